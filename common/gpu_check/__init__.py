"""Check of a GPU machine, step by step (`make gpu-check`)."""
