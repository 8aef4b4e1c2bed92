"""The one exception that a user is meant to read."""


class SimForcingError(Exception):
    """Bad input, in one line: what is wrong, where, and what to do. The command line exits with code 2."""
