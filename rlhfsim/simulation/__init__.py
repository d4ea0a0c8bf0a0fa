"""Discrete-event simulation of an iteration."""
