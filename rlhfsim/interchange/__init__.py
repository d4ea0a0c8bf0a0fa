"""One folder a framework: its keys, written and read, its configurations judged, its logs read."""
