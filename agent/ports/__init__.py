"""The doors to the outside world: protocols.py names them, one adapter per file."""
