"""Replicas are equal after every step, as if one process had trained on the joined batch."""
