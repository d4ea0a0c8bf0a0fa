"""Runs a plan as a real RLHF job on Ray, DeepSpeed and vLLM; docs/executor.md is its page."""
