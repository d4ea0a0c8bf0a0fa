"""Schedules whose samples are older than the weights: one-step-off and asynchronous."""
