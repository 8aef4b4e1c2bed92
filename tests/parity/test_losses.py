"""Both training losses: every term, what it is made of, and the gradient of every parameter.

The reference is the released code, `ObjectiveConfig.released()`: its frame 0 takes part in the motion loss, which
ignores padding, and its teacher reads the student's proprioception encoder.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from simforcing.model.released import our_name
from simforcing.model.world_model import WorldModel
from simforcing.train.objective import (
    Batch,
    Draws,
    ObjectiveConfig,
    estimate,
    flow_error,
    motion_error,
    noisy,
    padded_frames,
    single_domain_loss,
    student_loss,
)

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
OUTPUTS = {"flow_real": "loss_video_real", "flow_syn": "loss_video_syn", "motion_real": "loss_delta_real",
           "motion_syn": "loss_delta_syn", "total": "total"}  # fmt: skip
Tensors = dict[str, Tensor]


def config_of(t: Tensors, case: str) -> ObjectiveConfig:
    """The released objective; a case with `attrs` has four numbers and two more options."""
    if f"{case}.attrs" not in t:
        return ObjectiveConfig.released()
    when_conditioned, pool, motion_real, syn = t[f"{case}.attrs"].tolist()
    return ObjectiveConfig.released(
        condition_syn=True,
        motion_sigma="low_noise",
        motion_when_conditioned=when_conditioned,
        motion_pool=int(pool),
        motion_real_weight=motion_real,
        motion_syn_weight=ObjectiveConfig().syn_weight,
        syn_weight=syn,
    )


def batch_of(t: Tensors, case: str) -> Batch:
    pad = t.get(f"{case}.in.image_is_pad")
    return Batch(
        t["in.latents_real"], t["in.action"], t["in.proprio"][:, 0], t["in.context"], t["in.context_mask"],
        t["in.latents_syn"], padded=None if pad is None else padded_frames(pad),
    )  # fmt: skip


def draws_of(model: WorldModel, t: Tensors, case: str) -> Draws:
    """The draws of a case; what it does not say is: all gates open, nothing corrupted."""
    noise, n = t[f"{case}.in.noise"], len(t[f"{case}.in.noise"])
    timestep = model.flow.timestep(t[f"{case}.in.u"])
    gate = t.get(f"{case}.in.cond_on", torch.ones(n)).float()
    keep, spread, corruption = torch.ones(n), torch.zeros(n), torch.zeros_like(noise)
    if f"{case}.in.corrupt" in t:
        corrupt, alpha = t[f"{case}.in.corrupt"], t[f"{case}.in.alpha"]
        keep = torch.where(corrupt, alpha, keep)
        spread = torch.where(corrupt, (1 - alpha) * t[f"{case}.in.sigma"], spread)
        corruption = t[f"{case}.in.eps"]
    return Draws(noise, timestep, gate, keep, spread, corruption)


@pytest.fixture
def step(student: WorldModel, teacher: WorldModel, losses: Tensors) -> Callable[[str], SimpleNamespace]:
    """Batch, draws, configuration and loss terms of a case."""

    def run(case: str) -> SimpleNamespace:
        student.zero_grad()
        batch, draws, config = batch_of(losses, case), draws_of(student, losses, case), config_of(losses, case)
        terms = student_loss(student, teacher.requires_grad_(False), batch, draws, config)
        return SimpleNamespace(batch=batch, draws=draws, config=config, terms=terms)

    return run


def test_losses(losses: Tensors, step: Callable[[str], Any], loss_case: str) -> None:
    found, out = (
        step(loss_case),
        {k.split(".", 2)[2]: float(v) for k, v in losses.items() if k.startswith(f"{loss_case}.out")},
    )
    terms, config = {k: float(v.detach()) for k, v in found.terms.items()}, found.config
    ours = {theirs: terms[name] for name, theirs in OUTPUTS.items()}
    ours["loss_video"] = 0.5 * (config.real_weight * terms["flow_real"] + config.syn_weight * terms["flow_syn"])
    ours["loss_delta"] = terms["total"] - config.video_weight * ours["loss_video"]
    ours["frac_cond_on"] = float(found.draws.gate.mean())
    ours["loss_action"] = 0.0  # actions are given, not predicted
    assert ours == pytest.approx(out, rel=1e-4, abs=2e-5)


def test_parts_of_the_loss(student: WorldModel, losses: Tensors, step: Callable[[str], Any], watched_case: str) -> None:
    """Each function of the objective on the reference's own inputs to it."""
    case, flow = watched_case, student.flow
    mid = {k.removeprefix(f"{case}.mid."): v for k, v in losses.items() if k.startswith(f"{case}.mid.")}
    found = step(case)
    batch, draws, config = found.batch, found.draws, found.config
    torch.testing.assert_close(draws.timestep, losses[f"{case}.in.timestep"], atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(flow.weight(draws.timestep), mid["weight"], **CLOSE)
    sigma = draws.timestep / flow.train_steps
    taught = estimate(mid["noisy_syn"], mid["v_teacher"], sigma, None)
    torch.testing.assert_close(taught.diff(dim=2), mid["delta_teacher"], **CLOSE)
    for domain, clean in (("real", batch.latents), ("syn", batch.sim_latents)):
        x, v = mid[f"noisy_{domain}"], mid[f"v_{domain}"]
        torch.testing.assert_close(noisy(clean, draws, flow.train_steps), x, **CLOSE)
        torch.testing.assert_close(
            flow_error(v, clean, draws.noise, batch.padded), mid[f"{domain}_per_sample"], **CLOSE
        )
        guess = estimate(x, v, sigma, None)
        torch.testing.assert_close(guess.diff(dim=2), mid[f"delta_{domain}"], **CLOSE)
        error = motion_error(guess, taught, config, batch.padded)
        torch.testing.assert_close(error, mid[f"delta_{domain}_per_sample"], **CLOSE)


def test_what_the_networks_are_given_and_say(
    student: WorldModel, teacher: WorldModel, losses: Tensors, step: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch, watched_case: str,
) -> None:  # fmt: skip
    """Noisy inputs, the (corrupted) simulation, gates, and the velocities of both branches and of the teacher."""
    seen: dict[str, Any] = {}

    def spy(model: WorldModel, name: str) -> None:
        denoise, residuals = model.denoise, model.sim_residuals

        def watched(x: Tensor, *rest: Any, **more: Any) -> Tensor:
            seen[f"x_{name}"], seen[f"v_{name}"] = x, denoise(x, *rest, **more)
            return seen[f"v_{name}"]

        def watched_residuals(sim: Tensor | None, gate: Tensor | None = None) -> Any:
            seen[f"sim_{name}"], seen[f"gate_{name}"] = sim, gate
            return residuals(sim, gate)

        monkeypatch.setattr(model, "denoise", watched)
        monkeypatch.setattr(model, "sim_residuals", watched_residuals)

    spy(student, "student")
    spy(teacher, "teacher")
    found = step(watched_case)
    mid = {k.removeprefix(f"{watched_case}.mid."): v for k, v in losses.items() if k.startswith(f"{watched_case}.mid.")}
    for ours, name in (("x", "noisy"), ("v", "v")):
        for branch, domain in zip(seen[f"{ours}_student"].chunk(2), ("real", "syn"), strict=True):
            torch.testing.assert_close(branch, mid[f"{name}_{domain}"], **CLOSE)
    torch.testing.assert_close(seen["x_teacher"], mid["noisy_syn"], **CLOSE)
    torch.testing.assert_close(seen["v_teacher"], mid["v_teacher"], **CLOSE)
    assert seen["sim_teacher"] is None
    torch.testing.assert_close(seen["sim_student"].chunk(2)[0], mid["sim_latent_cond"], **CLOSE)
    gates = losses[f"{watched_case}.in.cond_on"].float()
    assert torch.equal(found.draws.gate, gates)
    branch = gates if found.config.condition_syn else torch.zeros_like(gates)
    assert torch.equal(seen["gate_student"], torch.cat([gates, branch]))


def test_gradients(
    student: WorldModel, teacher: WorldModel, losses: Tensors, read: Callable[[str], Any], step: Callable[[str], Any],
    gradient_case: str,
) -> None:  # fmt: skip
    step(gradient_case).terms["total"].backward()
    found = {name: p.grad for name, p in student.named_parameters()}
    prefix = f"{gradient_case}.gradnorm."
    norms = {k.removeprefix(prefix): float(v) for k, v in losses.items() if k.startswith(prefix)}
    total = norms.pop("__total__")
    for name, norm in norms.items():
        gradient = found[our_name(name)]
        ours = 0.0 if gradient is None else float(gradient.double().norm())
        assert ours == pytest.approx(norm, rel=1e-3, abs=1e-7), name
    squares = [g.double().square().sum() for g in found.values() if g is not None]
    assert math.sqrt(sum(squares)) == pytest.approx(total, rel=1e-3)
    prefix = f"{gradient_case}.grad."
    whole = {k.removeprefix(prefix): v for k, v in losses.items() if k.startswith(prefix)}
    assert whole
    for name, gradient in whole.items():
        ours = found[our_name(name)]
        assert float((torch.zeros_like(gradient) if ours is None else ours).sub(gradient).norm()) <= 1e-3 * float(
            gradient.norm()
        ), name
    meta = read("loss")[1]
    silent = {our_name(k) for kind in ("no_grad", "zero_grad") for k in meta[kind].get(gradient_case, [])}
    assert {n for n, g in found.items() if g is None or not g.any()} == silent
    unused = {name for name, _ in student.unused_parameters()}
    assert {our_name(k) for k in meta["no_grad"][gradient_case]} <= unused <= silent
    assert all(p.grad is None for p in teacher.parameters())


def test_loss_of_one_domain(teacher: WorldModel, losses: Tensors) -> None:
    terms = single_domain_loss(teacher, batch_of(losses, "S1"), draws_of(teacher, losses, "S1"))
    assert float(terms["total"].detach()) == pytest.approx(float(losses["S1.out.total"]), rel=1e-4)


def test_training_weight(student: WorldModel, losses: Tensors) -> None:
    weight = student.flow.weight(losses["sched.t"])
    torch.testing.assert_close(weight, losses["sched.training_weight"], atol=1e-6, rtol=1e-5)
    low, mean = losses["sched.ymin_norm"].tolist()
    bell = torch.exp(-2 * ((losses["sched.t"].double() - 500) / 1000) ** 2)
    torch.testing.assert_close(weight.double() * mean + low, bell, atol=1e-6, rtol=0)


def test_time_of_a_uniform_number(student: WorldModel, losses: Tensors) -> None:
    found = student.flow.timestep(losses["sched.u"])
    torch.testing.assert_close(found, losses["sched.phi_u_x1000"], atol=1e-4, rtol=1e-6)
