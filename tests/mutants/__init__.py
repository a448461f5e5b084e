"""Mutation testing: small changes of meaning that the tests should notice; `make mutants`."""
