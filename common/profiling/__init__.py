"""Times of a model's layers and of a network's collectives, measured or modelled."""
