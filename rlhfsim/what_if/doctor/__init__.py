"""A user's own configuration of a framework, judged."""
