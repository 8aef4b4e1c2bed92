"""Checks of configurations that were read from JSON, field by field against the types of a dataclass."""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from simforcing.errors import SimForcingError


def check_fields(kind: type, stored: Any, at: str) -> None:
    """Refuses a JSON value that cannot be a dataclass `kind`; unknown keys are left to who makes it.

    Sizes are whole numbers above zero, other numbers finite, and positive where they stand alone. Fields of other
    types than plain ones (arrays) are not in the value and not looked at.

    Raises:
        SimForcingError: names the field after `at`, which says where the value stands.
    """
    if not isinstance(stored, dict):
        raise SimForcingError(f"{at} is {stored!r}, it must be an object")
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in stored:
            _check(hints[field.name], stored[field.name], f"{at}.{field.name}")
        elif needed and _is_plain(hints[field.name]):
            raise SimForcingError(f"{at}.{field.name} is missing")


def _is_plain(hint: Any) -> bool:
    return hint in _PLAIN or get_origin(hint) in (tuple, dict, Literal) or _is_config(hint)


def _is_config(hint: Any) -> bool:
    """Whether a field is stored as an object of its own; what holds arrays is stored elsewhere."""
    return dataclasses.is_dataclass(hint) and all(_is_plain_or_union(h) for h in get_type_hints(hint).values())


def _is_plain_or_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) or _is_plain(hint)


def _check(hint: Any, value: Any, at: str, alone: bool = True) -> None:
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is not None or type(None) not in options:
            _check(next(o for o in options if o is not type(None)), value, at, alone)
    elif origin is Literal:
        if value not in options:
            raise SimForcingError(f"{at} is {value!r}, it must be one of {', '.join(map(str, options))}")
    elif origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(options):
            raise SimForcingError(f"{at} is {value!r}, it must be a list of {len(options)}")
        for i, (option, one) in enumerate(zip(options, value, strict=True)):
            _check(option, one, f"{at}[{i}]", alone=False)
    elif origin is dict:
        if not isinstance(value, dict):
            raise SimForcingError(f"{at} is {value!r}, it must be an object")
        for key, one in value.items():
            _check(options[1], one, f"{at}.{key}")
    elif _is_config(hint):
        check_fields(hint, value, at)
    elif hint in _PLAIN:
        wanted, fits = _PLAIN[hint]
        if not fits(value) or (hint is float and alone and value <= 0):
            raise SimForcingError(f"{at} is {value!r}, it must be {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda v: isinstance(v, bool)),
    int: ("a whole number of at least 1", lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1),
    float: ("a finite number, above zero where it is no end of a range", _is_number),
    str: ("a string", lambda v: isinstance(v, str)),
}
