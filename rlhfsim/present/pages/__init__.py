"""Pages of a plan, a run and a what-if."""
