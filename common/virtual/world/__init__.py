"""Virtual cluster: what the code of algorithms sees of a network on a virtual clock.

Where all ranks do the same at the same time, a world of any size runs as its rank 0 (`Alike`). Else
each rank is a thread, and one of them runs at a time (`Cluster`).
"""
