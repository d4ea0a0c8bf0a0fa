"""Ray: placement, worker groups, weight sync, buffer, checkpoints, tracing."""
