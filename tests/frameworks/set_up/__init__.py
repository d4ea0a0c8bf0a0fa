"""Frameworks' own set-up of their workers, run without GPUs: what a configuration makes of ranks and batches.

Each module answers with the fields of a plan that the framework derives, under the names that plans have.
"""
