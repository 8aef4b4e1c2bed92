"""Runs whose length is a number of epochs: steps, once the data are known."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from simforcing.errors import SimForcingError
from simforcing.train.checkpoint import Progress
from simforcing.train.loop import Run, TrainConfig, train

PAPER = TrainConfig(epochs=20.0, samples_per_episode=30)


def test_a_run_of_epochs_takes_their_steps(new_run: Callable[..., Run], tmp_path: Path) -> None:
    """Ten clips of five episodes, three a step: two epochs are 20 clips, or 5 x 4 x 2 = 40."""
    whole = new_run(tmp_path / "all", config={"steps": None, "epochs": 2.0})
    assert train(whole).step == 7
    assert train(whole).step == 7  # it is complete
    some = new_run(tmp_path / "some", config={"steps": None, "epochs": 2.0, "samples_per_episode": 4})
    assert train(some).step == 14


def test_an_epoch_is_all_clips_where_no_number_an_episode_is_given() -> None:
    config = TrainConfig(epochs=1.5, batch_size=4)
    assert config.resolved(clips=10, episodes=3).steps == 4
    assert config.resolved(clips=10, episodes=3, processes=2).steps == 2


def test_other_lengths_are_left_as_they_are() -> None:
    for config in (TrainConfig(steps=7), TrainConfig(seconds=2.0)):
        assert config.resolved(clips=10, episodes=3) == config
        assert config.lasting() == config
    epochs = PAPER
    assert epochs.lasting(steps=5).resolved(1, 1) == replace(epochs, epochs=None, steps=5)
    assert epochs.lasting(seconds=5.0).epochs is None


def test_epochs_have_no_length_before_the_data_are_known() -> None:
    for ask in (TrainConfig.passed, TrainConfig.rate):
        with pytest.raises(SimForcingError, match="resolved"):
            ask(TrainConfig(epochs=1.0), Progress())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 1.0, "steps": 3}, "length"),
        ({"epochs": 0.0}, "length"),
        ({"epochs": 1.0, "samples_per_episode": 0}, "samples per episode 0"),
    ],
)
def test_epochs_that_train_nothing_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(SimForcingError, match=message):
        TrainConfig(**changes)  # type: ignore[arg-type]
