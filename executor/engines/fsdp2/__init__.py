"""Training on PyTorch FSDP2: `fully_shard` over the decoder layers of a Hugging Face model."""
