"""Models of Hugging Face: heads, scoring."""
