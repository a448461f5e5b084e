"""Trials that train for a time: their curves, compared run by run, and the table of them."""
