"""Layer profiles from traces of torch.profiler."""
