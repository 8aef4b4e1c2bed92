"""Named ablations and baselines: what they set, and what is refused."""

import inspect
import re

import pytest

from simforcing.cli.train import Train
from simforcing.errors import SimForcingError
from simforcing.recipes import recipe
from simforcing.train.objective import ObjectiveConfig
from simforcing.train.overrides import overridden
from simforcing.train.presets import PRESETS, preset

PAPER = ObjectiveConfig(syn_share=0.25)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("full", {}),
        ("joint", {"motion_weight": 0.0, "retention": 0.0}),
        ("no-distillation", {"motion_weight": 0.0}),
        ("no-conditioning", {"retention": 0.0}),
        ("value", {"motion_target": "value"}),
        ("unanchored", {"clean_first_frame": False}),
        ("light", {"motion_weight": 0.05}),
    ],
)
def test_a_preset_changes_nothing_but_what_it_is_named_for(name: str, changes: dict[str, object]) -> None:
    found = preset(name, "student", True)
    objective = overridden(recipe("study"), "student", found.settings).objective
    assert objective == ObjectiveConfig(**{"syn_share": PAPER.syn_share} | changes)  # type: ignore[arg-type]


def test_every_preset_can_be_read() -> None:
    for name, found in PRESETS.items():
        assert preset(name, found.role, found.taught) is found
        overridden(recipe("study"), found.role, found.settings)


def test_help_names_every_preset() -> None:
    told = re.split(r"[^\w-]+", inspect.getsource(Train))
    assert set(PRESETS) <= set(told)


def test_wrong_names_roles_and_starts_are_refused() -> None:
    with pytest.raises(SimForcingError, match="did you mean 'no-conditioning'"):
        preset("no-condition", "student", True)
    with pytest.raises(SimForcingError, match="simforcing train baseline --preset scratch"):
        preset("scratch", "student", True)
    with pytest.raises(SimForcingError, match="leave out --teacher"):
        preset("scratch", "baseline", True)
    with pytest.raises(SimForcingError, match="give --teacher"):
        preset("real-only", "baseline", False)
