"""Figures, one file each, drawn from a sweep's records only."""
