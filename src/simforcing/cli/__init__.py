"""Thin commands: a dataclass each, whose fields are the options and whose `run` returns the exit code."""
