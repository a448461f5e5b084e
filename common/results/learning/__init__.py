"""Training trials: their curves, compared run by run, and the table of them."""
