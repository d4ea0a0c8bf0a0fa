"""Training engine on DeepSpeed."""
