"""Measurement of step times, of the load on the machine meanwhile, and raw measurements."""
