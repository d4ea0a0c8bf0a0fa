"""Generation: prefill, decode, continuous batching, environments."""
