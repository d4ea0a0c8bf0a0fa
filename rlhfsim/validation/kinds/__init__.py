"""Kinds of measured rows, each with its prediction."""
