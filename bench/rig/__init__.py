"""What the benchmark scripts stand on: hosts, the ranks of engines, rounds, limits and tables."""
