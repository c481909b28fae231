"""The delta codec: one file as a recipe over another, in bounded memory."""
