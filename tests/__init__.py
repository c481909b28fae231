"""Every test of the project, and the tools they share: the virtual board and the simulated NPU."""
