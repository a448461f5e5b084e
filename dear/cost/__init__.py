"""Cost of communication: measurements, fitted models and lower bounds."""
