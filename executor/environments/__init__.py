"""Environments: who answers between the turns of a response."""
