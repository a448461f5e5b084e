"""What all algorithms share: where they hook into a training loop, and the engines."""
