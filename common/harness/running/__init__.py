"""Sweeps: cells, rounds and launches of trials, and the records that they make."""
