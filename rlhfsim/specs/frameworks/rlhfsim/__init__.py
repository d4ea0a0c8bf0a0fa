"""rlhfsim's own executor."""
