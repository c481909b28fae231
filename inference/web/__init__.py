"""The page, the stream, the status and the events."""
