"""Fields of a recipe that the command line sets: `objective.motion_weight=0.25`, `training.ema=0.999`."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from simforcing.data.episode import nearest
from simforcing.errors import SimForcingError
from simforcing.train.recipe import Recipe, Role


def overridden(recipe: Recipe, role: Role, settings: Sequence[str]) -> Recipe:
    """The recipe with these `objective.` and `training.` fields of a role.

    Raises:
        SimForcingError: there is no such field (names the nearest), or its value is of another type.
    """
    parts = {"objective": "objective" if role == "student" else "flow_objective", "training": role}
    changed = with_settings({part: getattr(recipe, field) for part, field in parts.items()}, settings)
    return replace(recipe, **{parts[part]: config for part, config in changed.items()})


def with_settings(parts: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """These configurations by name, with `NAME.FIELD=VALUE` set in them.

    Raises:
        SimForcingError: there is no such field (names the nearest), or its value is of another type.
    """
    changes: dict[str, dict[str, Any]] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        part, dot, name = path.partition(".")
        if not equals or not dot:
            wanted = " or ".join(f"{part}.FIELD=VALUE" for part in parts)
            raise SimForcingError(f"--set {setting}: write {wanted}")
        if part not in parts:
            raise SimForcingError(f"--set {setting}: no part {part!r} of a recipe; {nearest(part, parts)}")
        known = get_type_hints(type(parts[part]))
        if name not in {f.name for f in fields(parts[part])}:
            raise SimForcingError(f"--set {setting}: no field {name!r} in {part}; {nearest(name, known)}")
        changes.setdefault(part, {})[name] = _read(text.strip(), known[name], setting)
    return {part: replace(config, **changes.get(part, {})) for part, config in parts.items()}


def _read(text: str, kind: Any, setting: str) -> Any:
    """Text as a value of a field's type."""
    options, origin = get_args(kind), get_origin(kind)
    if origin in (Union, types.UnionType):
        if text.lower() == "none" and type(None) in options:
            return None
        return _read(text, next(o for o in options if o is not type(None)), setting)
    if origin is Literal:
        if text not in options:
            raise SimForcingError(f"--set {setting}: no choice {text!r}; {nearest(text, options)}")
        return text
    if origin is tuple:
        parts = text.strip("()").split(",")
        if len(parts) != len(options):
            raise SimForcingError(f"--set {setting}: give {len(options)} values with commas between them")
        return tuple(_read(part.strip(), option, setting) for part, option in zip(parts, options, strict=True))
    readers: dict[Any, Any] = {bool: {"true": True, "false": False}.__getitem__, int: int, float: float, str: str}
    try:
        return readers[kind](text.lower() if kind is bool else text)
    except (ValueError, KeyError) as error:
        raise SimForcingError(f"--set {setting}: {text!r} is not of type {kind.__name__}") from error
