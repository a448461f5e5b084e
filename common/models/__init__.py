"""Models with the real shapes of weights, from the libraries of the field."""
