"""Models that a trial trains, real or replayed, and their data."""
