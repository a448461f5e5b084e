"""Fault campaign: faults drawn at random, done to jobs and sweeps, and checked; see `__main__`."""
