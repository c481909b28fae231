"""The delta codec: format, encoder (host) and applier (device)."""
