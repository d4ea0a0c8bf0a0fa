"""Prompts: generated tasks with checkable answers, files of the user, tiny models to try them on."""
