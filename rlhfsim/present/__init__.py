"""Findings, tables and figures, and how terminal and page show them."""
