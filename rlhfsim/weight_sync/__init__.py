"""Trained weights on their way to the rollout; sleep, wake and offload."""
