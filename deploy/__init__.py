"""How processes are put together and run."""

import model  # noqa: F401 - before torch
