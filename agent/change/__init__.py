"""The change engine: steps with do and undo, a journal, recovery."""
