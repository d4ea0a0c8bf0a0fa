"""A file of changes, each designed anew and compared."""
