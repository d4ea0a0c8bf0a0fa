"""Micro-benchmarks of this machine: one module a probe, each run in a process of its own."""
