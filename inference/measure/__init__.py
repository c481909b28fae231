"""What ran where, how fast, how right."""
