"""Starts the ranks of a job, waits for them, and cleans up; one file per launcher."""
