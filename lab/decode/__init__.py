"""Serving points of a pinned development package: read, priced, scored."""
