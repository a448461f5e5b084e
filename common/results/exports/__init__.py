"""Sweeps in the forms of other tools: pandas, the reference suites, Perfetto."""
