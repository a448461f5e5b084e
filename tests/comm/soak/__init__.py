"""Soak: ranks that exchange and train for hours (`make soak`), and a sweep of many trials."""
