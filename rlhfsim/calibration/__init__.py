"""From measured timings to better profiles."""
