"""Replicas differ and nobody waits for anybody's step."""
