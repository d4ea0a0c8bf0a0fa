"""One adapter a library: vLLM, DeepSpeed, transformers, and a fake that sleeps predicted times."""
