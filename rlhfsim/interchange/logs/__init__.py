"""Logs of any framework: files, records, configuration; one run as specs, steps and a trace."""
