"""Runs a plan as a real RLHF job; see docs/architecture.md for what is launched today."""
