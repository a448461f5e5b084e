"""Virtual hosts on one Linux machine, joined by links of a chosen speed. Torch-free."""
