"""Flight recorder: the last operations of each rank, and the first point at which ranks differ."""
