"""Models of Hugging Face: heads, adapters, scoring."""
