"""Parts that the wrappers of models that come with torch, DDP and FSDP2, need beside them."""
