"""Data sets that a model can be trained on."""

from common.models.datasets.sources import SOURCES, Parts, Samples, digest, load, path_of

__all__ = ["SOURCES", "Parts", "Samples", "digest", "load", "path_of"]
