"""What a policy starts from, and the report on it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simforcing.errors import InputError
from simforcing.model.backbone import resize
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.policy.policy import Policy, PolicyConfig
from simforcing.policy.start import StartReport, initialised, new_policy


@pytest.fixture
def world(config: PolicyConfig) -> Callable[..., WorldModel]:
    def made(**changes: Any) -> WorldModel:
        torch.manual_seed(5)
        values: dict[str, Any] = {"proprio_dim": 8, "sim_condition": True} | changes
        model = WorldModel(WorldModelConfig(config.video, config.action, config.channels, **values))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        return model

    return made


def accounted(policy: Policy, source: WorldModel | None, report: StartReport) -> None:
    """Every tensor of both is in the report once, and is what the report says."""
    ours, theirs = policy.state_dict(), source.state_dict() if source else {}
    fates = [*report.copied, *report.resized, *report.new]
    assert sorted(fates) == sorted(ours)
    used = {*report.copied.values(), *(name for name, _, _ in report.resized.values())}
    assert used | set(report.left_out) == set(theirs)
    assert not used & set(report.left_out)
    for name, origin in report.copied.items():
        assert torch.equal(ours[name], theirs[origin])
        assert ours[name].data_ptr() != theirs[origin].data_ptr()
    for name, (origin, there, here) in report.resized.items():
        assert tuple(theirs[origin].shape) == there != here == tuple(ours[name].shape)
        assert torch.equal(ours[name], resize(theirs[origin], here))
    fresh = new_policy(policy.config, seed=3).state_dict()
    assert all(torch.equal(ours[name], fresh[name]) for name in report.new)


def test_nothing(config: PolicyConfig) -> None:
    policy, report = initialised(config, seed=3)
    accounted(policy, None, report)
    parts = ("video", "action", "action.action_encoder", "action.head", "proprio")
    assert report.lines()[0] == "policy from nothing"
    assert {line.split(":")[0] for line in report.lines()[1:]} == set(parts)
    assert "action.head: 2 tensors new (random)" in report.lines()
    other, _ = initialised(config, seed=4)
    assert not torch.equal(other.action.head.weight, policy.action.head.weight)


@pytest.mark.parametrize("kind", ["teacher", "student", "baseline"])
def test_world_models(config: PolicyConfig, world: Callable[..., WorldModel], kind: Any) -> None:
    source = world(sim_condition=kind == "student")
    policy, report = initialised(config, source=source, kind=kind, seed=3, where="runs/a")
    accounted(policy, source, report)
    assert set(report.new) == {"action.head.weight", "action.head.bias"}
    assert {name.split(".")[0] for name in report.left_out} == ({"sim", "action"} if kind == "student" else {"action"})
    assert report.lines()[0] == f"policy from {kind} runs/a"
    assert "action.head: 2 tensors new (a world model does not train it)" in report.lines()
    assert ("the source's sim: 4 tensors left out (a policy sees no simulation)" in report.lines()) == (
        kind == "student"
    )


def test_base_video_model(config: PolicyConfig, world: Callable[..., WorldModel]) -> None:
    source = world(attention="bidirectional")
    policy, report = initialised(config, source=source, kind="base", seed=3)
    accounted(policy, source, report)
    assert all(name.startswith("video.") for name in report.copied.values())
    assert report.resized["action.blocks.0.ffn.net.0.proj.weight"] == (
        "video.blocks.0.ffn.net.0.proj.weight", (48, 24), (32, 16)
    )  # fmt: skip
    assert {name.rpartition(".")[0] for name in report.new} == {"action.action_encoder", "action.head", "proprio"}
    assert "the source's first frame sees later ones, the policy's does not" in report.lines()
    with pytest.raises(InputError, match="a base video model has no action expert"):
        initialised(config, source=source, kind="base", action_from="source")


def test_choices_for_the_action_expert(config: PolicyConfig, world: Callable[..., WorldModel]) -> None:
    source = world()
    for choice in ("source", "video", "nothing"):
        policy, report = initialised(config, source=source, kind="student", action_from=choice, seed=3)
        accounted(policy, source, report)
        assert ("action.action_encoder.weight" in report.copied) == (choice == "source")
        assert any(name.startswith("action.blocks") for name in report.new) == (choice == "nothing")
        assert bool(report.resized) == (choice == "video")
        assert "proprio.weight" in report.copied


def test_other_widths(config: PolicyConfig, world: Callable[..., WorldModel]) -> None:
    """Numbers of another meaning are not stretched; a hidden width is."""
    source = world(proprio_dim=7, action_dim=6)
    wider = replace(config, action=replace(config.action, dim=20))
    policy, report = initialised(wider, source=source, kind="teacher", seed=3)
    accounted(policy, source, report)
    assert report.new["action.action_encoder.weight"] == "the source's actions have 6 numbers"
    assert report.new["proprio.weight"] == "the source's states have another width"
    assert "action.blocks.0.attn1.to_q.weight" in report.resized
    assert "action.blocks.0.attn1.norm_q.weight" in report.copied


def test_refused(config: PolicyConfig, world: Callable[..., WorldModel]) -> None:
    with pytest.raises(InputError, match=r"video\.dim is 24, not 36; channels is 3, not 4"):
        initialised(replace(config, video=replace(config.video, dim=36), channels=4), source=world(), kind="teacher")
    with pytest.raises(InputError, match="kind = 'nothing' with a source"):
        initialised(config, source=world())
    with pytest.raises(InputError, match="kind = 'teacher' without a source"):
        initialised(config, kind="teacher")


def test_report_is_stored(config: PolicyConfig, world: Callable[..., WorldModel], tmp_path: Path) -> None:
    _, report = initialised(config, source=world(), kind="student", action_from="video", where="runs/b")
    report.write(tmp_path / "start.json")
    stored = json.loads((tmp_path / "start.json").read_text())
    assert stored == report.to_dict() and (stored["source"], stored["where"]) == ("student", "runs/b")
    assert stored["copied"] == report.copied and stored["left_out"] == report.left_out
