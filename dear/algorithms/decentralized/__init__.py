"""Replicas differ and average with neighbours in step."""
