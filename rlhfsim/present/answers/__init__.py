"""Answers of commands as content: one module a command, walked by the terminal, by pages and by JSON."""
