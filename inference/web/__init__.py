"""The page: the annotated stream, the state as JSON, poses as server-sent events, metrics."""
