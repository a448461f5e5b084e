"""Code of the benchmark suite, which the library `dear` does not use."""
