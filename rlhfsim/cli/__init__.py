"""The command line: talks to people; the only place that prints."""
