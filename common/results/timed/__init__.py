"""Trials with timed steps: rows, comparisons, and the sentences below their table."""
