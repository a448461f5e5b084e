"""Benchmarks of the communication engines; each script says by --help what it measures."""
