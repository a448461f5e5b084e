"""Shared code of the benchmark: harness, launchers, models and results; pip does not install it."""
