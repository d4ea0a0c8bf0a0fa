"""Several jobs on one cluster: next to each other, one after the other, or in turn on the same GPUs."""
