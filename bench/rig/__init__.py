"""Shared parts of the benchmark scripts: hosts, ranks of the engines, rounds, bars and tables."""
