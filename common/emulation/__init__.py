"""Virtual hosts on one Linux machine, connected by links of a chosen speed. Imports no torch."""
