"""Runs experiments: from a YAML file to records."""
