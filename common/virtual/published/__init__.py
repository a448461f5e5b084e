"""Published throughputs of real clusters, and their prediction from a few of them."""
