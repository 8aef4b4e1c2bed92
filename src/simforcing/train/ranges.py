"""Ranges of numbers in configurations, and their refusal in one line that names the field."""

import math
from dataclasses import dataclass
from typing import Any

from simforcing.errors import SimForcingError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above` and `below` leave an end out. NaN is in no range.

    infinite: infinity belongs to it where `high` is infinite.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies in the range."""
        if math.isnan(value) or (math.isinf(value) and not self.infinite):
            return False
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def check(self, name: str, value: Any) -> None:
        """Refuses a number, or any of several, outside the range; None is none and passes.

        Raises:
            SimForcingError: names the field, its value and the range.
        """
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not self.holds(number):
                raise SimForcingError(f"{name} = {value}: {self}")

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        high = f"below {self.high:g}" if self.below else f"at most {self.high:g}"
        ends = low if math.isinf(self.high) else f"{low} and {high}"
        return f"give a number {ends}" if self.infinite else f"give a finite number {ends}"


AT_LEAST_ONE = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, above=True)
SHARE = Range(0, 1)
SHARE_BELOW_ONE = Range(0, 1, below=True)
PERIOD = Range(0, infinite=True)
