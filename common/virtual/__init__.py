"""A job on a virtual cluster: what a step takes by the plan of its messages, without running it."""
