"""Losses, advantages, KL and the iteration loops: pure tensors over Protocols, no Ray, no engine."""
