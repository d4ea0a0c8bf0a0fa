"""Weights from a trainer to the rollout engine's workers."""
