"""One iteration: its calls priced and ordered."""
