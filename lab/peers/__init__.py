"""Other simulators, fed with our costs: what they answer beside what ours answers."""
