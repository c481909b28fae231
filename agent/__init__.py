"""The daemon that changes the model under a running service, its command line, and the host's half."""

VERSION = "0.1.0"
