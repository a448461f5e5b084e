"""Algorithms whose replicas differ; ranks average with their neighbours in the same step."""
