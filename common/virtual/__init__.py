"""Event model: computes the time of a training step on a cluster without running it."""
