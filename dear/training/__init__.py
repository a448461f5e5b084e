"""Parts that all algorithms share: hooks into a training loop, and engines."""
