"""Runs of other frameworks, read from their logs into run folders that `compare` and `calibrate` read."""
