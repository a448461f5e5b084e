"""Checks that a trial trains correctly, by plain training and by a serial reference."""
