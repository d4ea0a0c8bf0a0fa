"""A session of micro-benchmarks as a hardware profile."""
