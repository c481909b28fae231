"""Benchmarks: each a program that prints a table and writes build/bench/NAME.json."""
