"""Figures, one file each; they read records and nothing else."""
