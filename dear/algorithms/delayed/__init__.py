"""Replicas are equal, and apply gradients some steps after they were computed."""
