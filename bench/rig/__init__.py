"""Shared parts of the benchmark scripts: hosts, ranks, engines (libraries of collectives)."""
