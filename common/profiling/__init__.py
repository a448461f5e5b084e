"""How long each layer of a model takes on a device, recorded there or modelled."""
