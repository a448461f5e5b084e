"""Advice: which algorithm is fastest on a cluster, why, and where another one is."""
