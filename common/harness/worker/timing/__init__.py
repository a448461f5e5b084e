"""Step times, the load on the machine meanwhile, and raw measurements."""
