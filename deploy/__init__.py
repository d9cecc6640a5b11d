"""How processes are put together and run."""

import os

import model  # noqa: F401 - sets what torch reads as it is loaded

# gRPC prints a line for a peer that goes away; we tell of that in our own words. It reads this as it is loaded, and
# modules of this package load it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
