"""Parameters and gradients as flat memory, and what becomes of them."""
