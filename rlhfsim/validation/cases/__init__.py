"""Measured rows as the inputs of a prediction."""
