"""Training and scoring: layer time, pipeline, gradient exchange, optimizer step."""
