"""Numbers of configurations that are refused, each by the name of its field."""

import math
from dataclasses import fields

import pytest

from simforcing.errors import SimForcingError
from simforcing.train.config import TrainConfig
from simforcing.train.objective import ObjectiveConfig

NUMBERS = [f.name for f in fields(TrainConfig) if f.name not in ("steps", "seconds", "epochs", "betas")]
WEIGHTS = [f.name for f in fields(ObjectiveConfig) if f.type in (float, "float") or "weight" in f.name]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, -1, -math.inf])
def test_no_field_of_training_takes_nan_or_less_than_nothing(name: str, value: float) -> None:
    with pytest.raises(SimForcingError, match=name.replace("_", "[_ ]") if name != "lr" else "learning rate"):
        TrainConfig(steps=1, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (0.9, 1.0)), ("betas", (math.nan, 0.9)), ("clip", 0.0), ("clip", math.inf), ("final_lr", 1.1)],
)
def test_values_beyond_the_range(name: str, value: object) -> None:
    with pytest.raises(SimForcingError, match=name):
        TrainConfig(steps=1, **{name: value})


@pytest.mark.parametrize("length", ["seconds", "epochs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_run_has_a_finite_length(length: str, value: float) -> None:
    with pytest.raises(SimForcingError, match="length"):
        TrainConfig(**{length: value})


def test_never_and_always_are_periods() -> None:
    config = TrainConfig(steps=1, checkpoint_seconds=0.0, validate_seconds=math.inf)
    assert (config.checkpoint_seconds, config.validate_seconds) == (0.0, math.inf)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_no_field_of_the_objective_takes_nan_infinity_or_less_than_nothing(name: str, value: float) -> None:
    with pytest.raises(SimForcingError, match=name):
        ObjectiveConfig(**{name: value})


@pytest.mark.parametrize("name", ["corrupt_keep", "corrupt_noise"])
@pytest.mark.parametrize("value", [(0.9, 0.5), (-0.1, 0.5), (0.5, 1.1), (math.nan, 1.0)])
def test_corruption_is_ordered_shares(name: str, value: tuple[float, float]) -> None:
    with pytest.raises(SimForcingError, match=name):
        ObjectiveConfig(**{name: value})
