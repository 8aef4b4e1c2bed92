"""Both stages of a rollout at every guidance, step by step, and the schedules."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simforcing.model.flow import Flow
from simforcing.model.world_model import WorldModel
from simforcing.predict.sampler import Guidance, Inputs, SamplerConfig, sample, two_stages

ROLLOUT: dict[str, Any] = {"atol": 1e-4, "rtol": 0}
Tensors = dict[str, Tensor]


def inputs(t: Tensors, stage: str) -> Inputs:
    return Inputs(t["in.action"], t["in.proprio"], t[f"in.context_{stage}"], t[f"in.context_mask_{stage}"])


def options(name: str) -> dict[str, Any]:
    """Of a name like `w0.6.acfg1.5`: what differs from a plain rollout. A word that is not known is an error."""
    found: dict[str, float] = {}
    while name:
        part = re.match(r"\.?(w|acfg|shift|no_first)(\d+(?:\.\d+)?)?", name)
        assert part, f"what is {name}?"
        found[part[1]] = float(part[2] or 0)
        name = name[part.end() :]
    return {
        "guidance": Guidance(found.get("w", 0.0), action=found.get("acfg", 1.0)),
        "config": SamplerConfig.released(shift=found.get("shift")),
    } | ({"first": None} if "no_first" in found else {})


def run(model: WorldModel, t: Tensors, stage: str, steps: int, name: str) -> Tensor:
    plain = {"first": t[f"in.first_{stage}"], "sim_latents": t["out.sim_latents"] if stage == "real" else None}
    return sample(model, inputs=inputs(t, stage), noise=t[f"in.noise_{stage}"], steps=steps, **plain | options(name))


@pytest.fixture
def steps(read: Callable[[str], Any]) -> dict[str, int]:
    size = read("sample")[1]["config"]["size"]
    return {"sim": size["Ns"], "real": size["Nr"]}


def test_simulation(student: WorldModel, rollouts: Tensors, steps: dict[str, int], simulation: str) -> None:
    found = run(student, rollouts, "sim", steps["sim"], simulation)
    torch.testing.assert_close(found, rollouts[f"out.sim_latents{simulation}"], **ROLLOUT)


def test_video(student: WorldModel, rollouts: Tensors, steps: dict[str, int], video: str) -> None:
    found = run(student, rollouts, "real", steps["real"], video)
    torch.testing.assert_close(found, rollouts[f"out.real.{video}"], **ROLLOUT)


def test_every_weight_of_the_set_is_there(rollouts: Tensors, read: Callable[[str], Any]) -> None:
    weights = read("sample")[1]["config"]["size"]["w"]
    assert weights
    assert {f"out.real.w{w:g}" for w in weights} <= rollouts.keys()


@torch.no_grad()
def test_every_step(
    student: WorldModel, rollouts: Tensors, steps: dict[str, int], stepwise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the one-call forward, and as the sampler goes, which leaves the first frame out of its steps."""
    guidance = options(stepwise)["guidance"]
    states: list[Tensor] = []
    denoise = student.denoise

    def watched(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        states.append(x)
        return denoise(x, *rest, **more)

    monkeypatch.setattr(student, "denoise", watched)
    states.append(run(student, rollouts, "real", steps["real"], stepwise)[:, :, 1:])
    monkeypatch.undo()
    a, sim, first = inputs(rollouts, "real"), rollouts["out.sim_latents"], rollouts["in.first_real"]
    context, mask = student.context(a.text, a.text_mask, a.proprio)
    x = torch.cat([first, rollouts["in.noise_real"][:, :, 1:]], dim=2)
    assert len(states) == steps["real"] + 1
    for i, (t, delta) in enumerate(zip(*student.flow.steps(steps["real"]), strict=True)):
        arguments = (x, t.expand(len(x)), a.action, context, mask)
        off, on = student.velocity(*arguments), student.velocity(*arguments, sim_latents=sim)
        velocity = off + guidance.w * (on - off)
        torch.testing.assert_close(velocity, rollouts[f"mid.real.{stepwise}.step{i}.v"], **ROLLOUT)
        x, expected = x + delta * velocity, rollouts[f"mid.real.{stepwise}.step{i}.x_before_clamp"]
        torch.testing.assert_close(x, expected, **ROLLOUT)
        torch.testing.assert_close(states[i + 1], expected[:, :, 1:], **ROLLOUT)
        x = torch.cat([first, x[:, :, 1:]], dim=2)


def test_both_stages_in_one(student: WorldModel, rollouts: Tensors, steps: dict[str, int]) -> None:
    """The reference's stages start from different noise; one call starts both from the same."""
    given = (rollouts["in.first_real"], rollouts["in.first_sim"], inputs(rollouts, "real"), inputs(rollouts, "sim"))
    found = two_stages(student, *given, rollouts["in.noise_sim"], steps["sim"], steps["real"])
    assert found.sim is not None
    torch.testing.assert_close(found.sim, rollouts["out.sim_latents"], **ROLLOUT)
    real = sample(
        student, given[0], given[2], rollouts["in.noise_sim"], steps["real"], rollouts["out.sim_latents"], Guidance()
    )
    torch.testing.assert_close(found.real, real, **ROLLOUT)


@pytest.mark.parametrize(("rounded", "suffix"), [(torch.float32, ""), (torch.bfloat16, "_bf16_as_f32")])
def test_schedules(rollouts: Tensors, count: str, rounded: torch.dtype, suffix: str) -> None:
    timesteps, deltas = Flow().steps(int(count), rounded)
    torch.testing.assert_close(timesteps, rollouts[f"sched.{count}.timesteps{suffix}"], atol=1e-4, rtol=0)
    torch.testing.assert_close(deltas, rollouts[f"sched.{count}.deltas{suffix}"], atol=1e-7, rtol=0)
