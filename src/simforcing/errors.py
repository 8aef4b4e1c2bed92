"""The exceptions that a user is meant to read."""

from collections.abc import Sequence
from typing import Any

LARGEST_SEED = 2**63 - 1


class SimForcingError(Exception):
    """Bad input, in one line: what is wrong, where, and what to do. The command line exits with code 2."""


class InputError(SimForcingError, ValueError):
    """An argument of a function has the wrong shape or values; names argument, what it is and what it must be."""


def check_seed(seed: int, name: str = "seed") -> None:
    """Refuses a seed that some generator of random numbers would not take.

    Raises:
        SimForcingError: it is not in 0 .. `LARGEST_SEED`.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise SimForcingError(f"{name} {seed}: give a whole number from 0 to {LARGEST_SEED}")


def check_shape(name: str, value: Any, wanted: Sequence[int | str]) -> None:
    """Compares an array's shape with numbers, or names of sizes that may be anything.

    Raises:
        InputError: they differ.
    """
    got = tuple(value.shape)
    fits = len(got) == len(wanted) and all(isinstance(w, str) or w == g for w, g in zip(wanted, got, strict=True))
    if not fits:
        shape = ", ".join(str(w) for w in wanted)
        raise InputError(f"{name} has shape {list(got)}, it must be [{shape}]")
