"""Costs of collectives on clusters that are only described, composed of messages."""
