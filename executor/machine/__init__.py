"""What a machine offers to a run, read within seconds and judged: no torch, no Ray."""
