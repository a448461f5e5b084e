"""Runs sweeps: cells, rounds and launches of trials (see `cell`), and makes their records."""
