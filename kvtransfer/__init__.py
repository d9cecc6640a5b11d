"""Moves the blocks of one worker's cache into another's: tickets, leases, geometry, NIXL."""

import model  # noqa: F401 - sets what torch reads as it is loaded
