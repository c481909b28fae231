"""The verbs of avocadoctl that ask the board's agent, one module for each word; cli.py imports the one it needs."""
