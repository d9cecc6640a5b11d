"""Moves the blocks of one worker's cache into another's: tickets, leases, geometry, NIXL."""
