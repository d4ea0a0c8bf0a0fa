"""Training on DeepSpeed: ZeRO, AutoTP, adapters, and what a pipeline on it shares."""
