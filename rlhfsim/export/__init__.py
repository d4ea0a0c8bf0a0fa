"""What is written for other tools: Chrome traces, figures of a run."""
