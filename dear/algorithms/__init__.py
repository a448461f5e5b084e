"""Training algorithms, one per file; the file name is the algorithm's name."""
