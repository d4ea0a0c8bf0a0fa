"""Pipeline parallelism on DeepSpeed."""
