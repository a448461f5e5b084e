"""Shared machinery of the benchmark: harness, launchers, models, results. Not installed."""
