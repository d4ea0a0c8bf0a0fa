"""Pages with pictures."""
