"""Tokenizes, places, relays, retries; knows the workers and their roles."""
