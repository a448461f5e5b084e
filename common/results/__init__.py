"""Records, and what is derived from them: statistics, tables."""
