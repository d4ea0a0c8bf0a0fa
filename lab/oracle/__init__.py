"""What a training step of the executor's models holds in memory, run on fake tensors: no GPU, no weights."""
