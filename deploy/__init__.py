"""How processes are put together and run."""

import model  # noqa: F401 - sets what torch reads as it is loaded
