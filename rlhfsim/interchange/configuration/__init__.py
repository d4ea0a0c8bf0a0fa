"""What configurations of frameworks share: their forms, their values, and what they say of a run."""
