"""How long steps take, what the machine did meanwhile, and the raw moments behind the numbers."""
