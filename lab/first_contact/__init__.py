"""What a few minutes on a GPU machine can prove, as a table of expected against seen (docs/gpu.md)."""
