"""Robot models by name from MuJoCo Menagerie, through its own package `mujoco-menagerie` (optional)."""

import difflib
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from simforcing.errors import SimForcingError

_NAME = re.compile(r"[a-z][a-z0-9_]*(:[A-Za-z0-9_]+)?")


def looks_like_a_name(text: str) -> bool:
    """Whether `text` can be a name such as `franka_emika_panda`, or `franka_emika_panda:panda_nohand`."""
    return _NAME.fullmatch(text) is not None


def model_file(name: str, others: Sequence[str] = ()) -> Path:
    """The MJCF file of a Menagerie robot: of its default model, or of the one named after a colon.

    The package keeps what it has downloaded. `others` are names that would have been known too, for the error
    message. Raises SimForcingError, in one line, where the package is missing, the name is unknown, or the
    model is not there yet and cannot be downloaded.
    """
    robot, _, entry = name.partition(":")
    try:
        menagerie = import_module("mujoco_menagerie")
    except ModuleNotFoundError as error:
        raise SimForcingError(
            f"robot '{name}': no such file, and not among {', '.join(others)}; give an .xml (MJCF) or .urdf, or "
            "pip install mujoco-menagerie for models by name"
        ) from error
    try:
        found = menagerie.get(robot)
        return Path(found.xml(entry or found.default_model))
    except menagerie.UnknownRobotError as error:
        arms = [*others, *(arm.name for arm in menagerie.robots("arm"))]
        near = difflib.get_close_matches(robot, arms, n=3, cutoff=0.4) or arms
        raise SimForcingError(
            f"robot '{name}': no such file, bundled arm or MuJoCo Menagerie name; near it: {', '.join(near)}"
        ) from error
    except menagerie.UnknownEntryPointError as error:
        raise SimForcingError(f"robot '{name}': {robot} has the models {', '.join(found.entry_names)}") from error
    except (menagerie.MenagerieError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SimForcingError(
            f"robot '{name}': not downloaded yet, and MuJoCo Menagerie cannot be reached ({reason}); try again with "
            "a network, or give the path of an .xml (MJCF) or .urdf"
        ) from error
