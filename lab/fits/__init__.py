"""Fits of shipped coefficients."""
