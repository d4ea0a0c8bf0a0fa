"""Figures of the report."""
