"""Flat memory for parameters and gradients; grouping, compression and averaging of gradients."""
