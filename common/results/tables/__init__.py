"""Tables of rows, and what they have in common."""
