"""Algorithms whose replicas are equal and apply gradients some steps after computing them."""
