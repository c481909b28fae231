"""Cameras: a replayed sequence or V4L2, read in a thread and handed to asyncio one frame at a time."""
