"""The algorithms, one file each; the file name is the name."""
