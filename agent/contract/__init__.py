"""What host and device agree on; pure values, no effects."""
