"""Algorithms whose replicas differ; no rank waits for another rank's step."""
