"""Measures what a training step is made of: a model's layers, and the network between ranks."""
