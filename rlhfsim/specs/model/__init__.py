"""Shapes of language models: presets, Hugging Face configs, who plays which role."""
