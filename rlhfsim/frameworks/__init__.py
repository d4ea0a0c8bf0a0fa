"""One folder a framework: what it can run, what its software costs, how its logs read."""
