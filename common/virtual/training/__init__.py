"""Training on the virtual cluster: of one rank that stands for all, of each rank, or from a tape.

A tape has the calls of a program that acts on no time, to play them at other speeds (`tape`).
"""
