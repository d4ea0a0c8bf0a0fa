"""Enumerate plans, price them, rank them, explain the choice."""
