"""Records of a virtual rank: a trace of its steps, and a tape of its calls for other clocks."""
