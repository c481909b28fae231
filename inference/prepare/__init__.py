"""Float model to INT8 to what one NPU loads."""
