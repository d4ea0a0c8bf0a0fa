"""A whole run of many steps: lengths, limits and batches that change, and where another plan pays."""
