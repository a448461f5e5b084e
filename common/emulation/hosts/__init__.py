"""Virtual hosts: their namespaces, addresses and names."""
