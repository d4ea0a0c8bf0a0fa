"""What developers run: benchmarks and fits; not in the wheel."""
