"""A run against its plan."""
