"""Named trainings: the method, its ablations and the baselines, as fields of a recipe that they set."""

from dataclasses import dataclass

from simforcing.data.episode import nearest
from simforcing.errors import SimForcingError
from simforcing.train.recipe import Role


@dataclass(frozen=True)
class Preset:
    """A role, whether it starts from a teacher, and what `--set` would set. `says`: what it is, in words."""

    role: Role
    taught: bool
    says: str
    settings: tuple[str, ...] = ()


_NO_MOTION, _NO_SIMULATION = "objective.motion_weight=0", "objective.retention=0"

PRESETS: dict[str, Preset] = {
    "teacher": Preset("teacher", False, "simulated video alone"),
    "scratch": Preset("baseline", False, "real video alone, from fresh weights"),
    "real-only": Preset("baseline", True, "real video alone, from the teacher's weights"),
    "full": Preset("student", True, "the method: joint flow matching, motion distillation, simulation condition"),
    "joint": Preset(
        "student", True, "joint flow matching, neither distillation nor condition", (_NO_MOTION, _NO_SIMULATION)
    ),
    "no-distillation": Preset("student", True, "the method without motion distillation", (_NO_MOTION,)),
    "no-conditioning": Preset("student", True, "the method without simulation condition", (_NO_SIMULATION,)),
    "value": Preset(
        "student", True, "distils the estimates, not their differences", ("objective.motion_target=value",)
    ),
    "unanchored": Preset(
        "student",
        True,
        "the motion loss holds the untrained velocity of frame 0, as in the released code",
        ("objective.clean_first_frame=false",),
    ),
    "light": Preset("student", True, "a tenth of the weight of motion distillation", ("objective.motion_weight=0.05",)),
}
"""`simforcing train ROLE --preset NAME`. The copy of the first frame needs no training: `evaluate --control copy`."""


def preset(name: str, role: Role, taught: bool) -> Preset:
    """The preset of this name, for a run of this role that starts from a teacher or not.

    Raises:
        SimForcingError: there is none (names the nearest), or it is for another role or start.
    """
    if name not in PRESETS:
        raise SimForcingError(f"no preset {name!r}; {nearest(name, PRESETS)}")
    found = PRESETS[name]
    if found.role != role:
        raise SimForcingError(f"preset {name!r} is for a {found.role}: simforcing train {found.role} --preset {name}")
    if found.taught != taught:
        what = (
            "starts from a model: give --teacher" if found.taught else "starts from fresh weights: leave out --teacher"
        )
        raise SimForcingError(f"preset {name!r} {what}")
    return found
