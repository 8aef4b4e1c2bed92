"""A policy's configuration and files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simforcing.errors import InputError, SimForcingError
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.policy.policy import Policy, PolicyConfig


def test_saved_and_loaded(tiny: Callable[..., Policy], tmp_path: Path) -> None:
    policy = tiny(variant="idm", action_positions="frame")
    policy.save_pretrained(tmp_path / "p")
    loaded = Policy.from_pretrained(tmp_path / "p")
    assert isinstance(loaded, Policy)
    assert loaded.config == policy.config
    state = policy.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in loaded.state_dict().items())


def test_a_policy_is_no_world_model_and_the_other_way_round(tiny: Callable[..., Policy], tmp_path: Path) -> None:
    policy = tiny()
    policy.save_pretrained(tmp_path / "policy")
    with pytest.raises(SimForcingError, match="unknown keys frames, horizon, variant"):
        WorldModel.from_pretrained(tmp_path / "policy")
    config = policy.config
    world = WorldModel(WorldModelConfig(config.video, config.action, config.channels, sim_condition=False))
    world.save_pretrained(tmp_path / "world")
    with pytest.raises(SimForcingError, match="this is a world model, not a policy"):
        Policy.from_pretrained(tmp_path / "world")
    with pytest.raises(SimForcingError, match="a policy predicts actions"):
        policy.predict()


def test_a_misspelt_key_is_an_error(tiny: Callable[..., Policy], tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "p")
    path = tmp_path / "p" / "config.json"
    description = json.loads(path.read_text())
    description["model"]["horizn"] = description["model"].pop("horizon")
    path.write_text(json.dumps(description))
    with pytest.raises(SimForcingError, match="unknown keys horizn"):
        Policy.from_pretrained(tmp_path / "p")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variant": "first_frame"}, "variant = 'first_frame': there are first-frame, joint, idm"),
        ({"sim_condition": True}, "a policy has no simulation to look at"),
        ({"attention": "bidirectional"}, "only first_frame_causal fits"),
        ({"horizon": 7}, "horizon = 7, frames = 3"),
        ({"frames": 1}, "at least two latent frames"),
    ],
)
def test_bad_configurations(config: PolicyConfig, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(config, **changes)


def test_everything_is_used(tiny: Callable[..., Policy]) -> None:
    assert list(tiny().unused_parameters()) == []
