"""The pose service, its supervisor and workers, and what measures them."""
