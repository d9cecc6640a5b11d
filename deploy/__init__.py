"""How processes are put together and run."""
