"""Virtual cluster: the algorithms' own code trains replayed models on a virtual clock.

All ranks do the same at the same time, so a world of any size runs as its rank 0 (`Network`).
"""
