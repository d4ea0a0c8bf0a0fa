"""Bytes: weights, optimizer, activations, KV cache; the ledger of a step and its risk."""
