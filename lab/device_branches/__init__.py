"""Statements of `executor/` that run on a GPU only, and which tests run them."""
