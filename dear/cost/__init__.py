"""What communication costs, measured and at least."""
