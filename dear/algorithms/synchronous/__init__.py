"""Algorithms whose replicas equal serial training on the joined batch after every step."""
