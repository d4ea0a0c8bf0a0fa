"""Predictions of published measurements: rows, what fitted a constant, every publisher left out, targets."""
