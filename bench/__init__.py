"""Benchmarks of collectives, links, wrappers and statistics; --help of a script describes it."""
