"""Parameters that are sharded by PyTorch's FSDP2."""
