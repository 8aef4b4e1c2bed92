"""Fields of a recipe set by the command line."""

from typing import Any

import pytest

from simforcing.errors import SimForcingError
from simforcing.recipes import named
from simforcing.train.overrides import overridden

DEMO = named("demo")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("objective.motion_weight=0.25", 0.25),
        ("objective.motion_target=value", "value"),
        ("objective.clean_first_frame=False", False),
        ("objective.motion_real_weight=2", 2.0),
        ("objective.motion_real_weight=none", None),
        ("objective.corrupt_keep=0.1, 0.2", (0.1, 0.2)),
        ("objective.motion_pool=2", 2),
        ("training.ema=0.99", 0.99),
        ("training.rollout_every=50", 50),
    ],
)
def test_a_field_is_set_and_nothing_else(setting: str, value: Any) -> None:
    part, name = setting.partition("=")[0].split(".")
    found = overridden(DEMO, "student", [setting])
    config = found.objective if part == "objective" else found.student
    before = DEMO.objective if part == "objective" else DEMO.student
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)
    assert {k for k, v in vars(config).items() if v != getattr(before, k)} <= {name}
    assert found.teacher == DEMO.teacher and found.flow_objective == DEMO.flow_objective


def test_teacher_and_baseline_have_an_objective_of_their_own() -> None:
    found = overridden(DEMO, "teacher", ["objective.action_dropout=0.1", "training.lr=0.5"])
    assert (found.flow_objective.action_dropout, found.teacher.lr) == (0.1, 0.5)
    assert found.objective == DEMO.objective and found.student == DEMO.student


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("objective.motion_wieght=1", "no field 'motion_wieght' in objective; did you mean 'motion_weight'?"),
        ("objectiv.motion_weight=1", "no part 'objectiv' of a recipe; did you mean 'objective'?"),
        ("objective.motion_target=values", "no choice 'values'; did you mean 'value'?"),
        ("objective.motion_weight", "write objective.FIELD=VALUE"),
        ("motion_weight=1", "write objective.FIELD=VALUE"),
        ("objective.motion_pool=1.5", "'1.5' is not of type int"),
        ("objective.clean_first_frame=maybe", "'maybe' is not of type bool"),
        ("objective.corrupt_keep=0.1", "give 2 values"),
        ("objective.retention=1.5", "a probability lies between 0 and 1"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest(setting: str, message: str) -> None:
    with pytest.raises(SimForcingError) as error:
        overridden(DEMO, "student", [setting])
    assert message in str(error.value)
