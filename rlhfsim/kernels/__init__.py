"""Kernels: measured curves, collectives, links, and what a Cost is."""
