"""A running job against its plan: where it is, what grows, and when that ends."""
