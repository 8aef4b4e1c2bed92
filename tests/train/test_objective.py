"""Losses against the reference numbers, and what the objective promises.

The reference is the released code: its first frame takes part in the motion loss (`clean_first_frame=False`), its
teacher reads the student's proprioception encoder, and both domains share one prompt.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.released import our_name
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import LatentClips
from simforcing.train.objective import (
    Batch,
    Draws,
    ObjectiveConfig,
    draw,
    flow_error,
    motion,
    noisy,
    single_domain_loss,
    student_loss,
)

RELEASED = ObjectiveConfig(clean_first_frame=False)
OUTPUTS = {"flow_real": "loss_video_real", "flow_syn": "loss_video_syn", "motion_real": "loss_delta_real",
           "motion_syn": "loss_delta_syn", "total": "total"}  # fmt: skip
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def reference_batch(t: dict[str, Tensor]) -> Batch:
    text, mask = t["in.context"], t["in.context_mask"].bool()
    return Batch(
        t["in.latents_real"], t["in.action"], t["in.proprio"][:, 0], text, mask, t["in.latents_syn"], text, mask
    )


def reference_draws(model: WorldModel, t: dict[str, Tensor], case: str) -> Draws:
    """The draws of a case; what it does not say is: all gates open, nothing corrupted."""
    noise, n = t[f"{case}.in.noise"], len(t[f"{case}.in.noise"])
    timestep = t.get(f"{case}.in.timestep", model.flow.timestep(t[f"{case}.in.u"]))
    gate = t.get(f"{case}.in.cond_on", torch.ones(n)).float()
    keep, spread, corruption = torch.ones(n), torch.zeros(n), torch.zeros_like(noise)
    if f"{case}.in.corrupt" in t:
        corrupt, alpha = t[f"{case}.in.corrupt"].bool(), t[f"{case}.in.alpha"]
        keep = torch.where(corrupt, alpha, keep)
        spread = torch.where(corrupt, (1 - alpha) * t[f"{case}.in.sigma"], spread)
        corruption = t[f"{case}.in.eps"]
    return Draws(noise, timestep, gate, keep, spread, corruption)


def released_terms(reference: Any, case: str) -> dict[str, Tensor]:
    reference.student.zero_grad()
    draws = reference_draws(reference.student, reference.tensors, case)
    return student_loss(reference.student, reference.teacher, reference_batch(reference.tensors), draws, RELEASED)


@pytest.mark.parametrize("case", ["A", "B", "E"])
def test_losses_equal_the_reference(reference: Any, case: str) -> None:
    terms = released_terms(reference, case)
    for ours, theirs in OUTPUTS.items():
        expected = float(reference.tensors[f"{case}.out.{theirs}"])
        assert float(terms[ours].detach()) == pytest.approx(expected, rel=1e-4), ours


def test_scaled_sums_equal_the_reference(reference: Any) -> None:
    terms, t = released_terms(reference, "A"), reference.tensors
    for kind, name, weight in (("flow", "loss_video", 1.0), ("motion", "loss_delta", 0.5)):
        value = weight * 0.5 * (terms[f"{kind}_real"] + 0.1 * terms[f"{kind}_syn"])
        assert float(value.detach()) == pytest.approx(float(t[f"A.out.{name}"]), rel=1e-4)


def test_motion_with_padding_and_flow_without_equal_the_reference(reference: Any) -> None:
    """Case C pads the last sample: its motion loss ignores that, and the samples before it are not touched."""
    terms, t = released_terms(reference, "C"), reference.tensors
    for name in ("motion_real", "motion_syn"):
        assert float(terms[name].detach()) == pytest.approx(float(t[f"C.out.{OUTPUTS[name]}"]), rel=1e-4)
    for domain in ("real", "syn"):
        error = flow_error(t[f"C.mid.v_{domain}"], t[f"in.latents_{domain}"], t["C.in.noise"])
        torch.testing.assert_close(error[:-1], t[f"C.mid.{domain}_per_sample"][:-1], **CLOSE)


@pytest.mark.parametrize("case", ["A", "B", "C"])
def test_intermediate_values_equal_the_reference(reference: Any, case: str) -> None:
    t, flow = reference.tensors, reference.student.flow
    draws = reference_draws(reference.student, t, case)
    sigma = draws.timestep / flow.train_steps
    torch.testing.assert_close(flow.weight(draws.timestep), t[f"{case}.mid.weight"], **CLOSE)
    target = motion(t[f"{case}.mid.noisy_syn"], t[f"{case}.mid.v_teacher"], sigma, None)
    torch.testing.assert_close(target, t[f"{case}.mid.delta_teacher"], **CLOSE)
    for domain in ("real", "syn"):
        clean, x, v = t[f"in.latents_{domain}"], t[f"{case}.mid.noisy_{domain}"], t[f"{case}.mid.v_{domain}"]
        torch.testing.assert_close(noisy(clean, draws, flow.train_steps), x, **CLOSE)
        delta = motion(x, v, sigma, None)
        torch.testing.assert_close(delta, t[f"{case}.mid.delta_{domain}"], **CLOSE)
        per_sample = (delta - target).square().flatten(1).mean(1)
        torch.testing.assert_close(per_sample, t[f"{case}.mid.delta_{domain}_per_sample"], **CLOSE)
        if case != "C":
            torch.testing.assert_close(flow_error(v, clean, draws.noise), t[f"{case}.mid.{domain}_per_sample"], **CLOSE)


@pytest.mark.parametrize("case", ["A", "B"])
def test_network_sees_and_says_what_the_reference_does(
    reference: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Noisy inputs, the (corrupted) simulation, and the velocities of both branches and of the teacher."""
    seen: dict[str, Any] = {}

    def spy(model: WorldModel, name: str) -> None:
        denoise, residuals = model.denoise, model.sim_residuals

        def watched(x: Tensor, *rest: Any, **more: Any) -> Tensor:
            seen[f"x_{name}"], seen[f"v_{name}"] = x, denoise(x, *rest, **more)
            return seen[f"v_{name}"]

        def watched_residuals(sim: Tensor | None, gate: Tensor | None = None) -> list[Tensor] | None:
            seen[f"sim_{name}"], seen[f"gate_{name}"] = sim, gate
            return residuals(sim, gate)

        monkeypatch.setattr(model, "denoise", watched)
        monkeypatch.setattr(model, "sim_residuals", watched_residuals)

    spy(reference.student, "student")
    spy(reference.teacher, "teacher")
    released_terms(reference, case)
    t = reference.tensors
    for what, name in (("x", "noisy"), ("v", "v")):
        for ours, domain in zip(seen[f"{what}_student"].chunk(2), ("real", "syn"), strict=True):
            torch.testing.assert_close(ours, t[f"{case}.mid.{name}_{domain}"], **CLOSE)
    torch.testing.assert_close(seen["x_teacher"], t[f"{case}.mid.noisy_syn"], **CLOSE)
    torch.testing.assert_close(seen["v_teacher"], t[f"{case}.mid.v_teacher"], **CLOSE)
    torch.testing.assert_close(seen["sim_student"].chunk(2)[0], t[f"{case}.mid.sim_latent_cond"], **CLOSE)
    gates = t[f"{case}.in.cond_on"].float()
    assert torch.equal(seen["gate_student"], torch.cat([gates, torch.zeros_like(gates)]))
    assert seen["sim_teacher"] is None


@pytest.mark.parametrize("case", ["A", "B"])
def test_gradients_equal_the_reference(reference: Any, case: str) -> None:
    released_terms(reference, case)["total"].backward()
    t = reference.tensors
    found = {name: p.grad for name, p in reference.student.named_parameters()}
    prefix = f"{case}.gradnorm."
    expected = {k.removeprefix(prefix): float(v) for k, v in t.items() if k.startswith(prefix)}
    total = expected.pop("__total__")
    for name, norm in expected.items():
        gradient = found[our_name(name)]
        ours = 0.0 if gradient is None else float(gradient.norm())
        assert ours == pytest.approx(norm, rel=1e-3, abs=1e-7), name
    squares = [g.double().square().sum() for g in found.values() if g is not None]
    assert math.sqrt(sum(squares)) == pytest.approx(total, rel=1e-3)
    prefix = f"{case}.grad."
    whole = {k.removeprefix(prefix): v for k, v in t.items() if k.startswith(prefix)}
    assert len(whole) == 5
    for name, gradient in whole.items():
        torch.testing.assert_close(found[our_name(name)], gradient, atol=1e-5, rtol=1e-3)
    silent = {our_name(k) for kind in ("no_grad", "zero_grad") for k in reference.meta[kind].get(case, [])}
    gradless = {n for n, g in found.items() if g is None or not g.any()}
    assert gradless == silent
    assert all(p.grad is None for p in reference.teacher.parameters())


def test_single_domain_loss_equals_the_reference(reference: Any) -> None:
    t, teacher = reference.tensors, reference.teacher
    terms = single_domain_loss(teacher, reference_batch(t), reference_draws(teacher, t, "S1"))
    assert float(terms["total"].detach()) == pytest.approx(float(t["S1.out.total"]), rel=1e-4)
    assert terms["flow"] is terms["total"]


# -- properties ---------------------------------------------------------------------------------------------------


@pytest.fixture
def student(new_model: Callable[..., WorldModel]) -> WorldModel:
    """Its simulation projections are not zero, so that the condition matters."""
    model = new_model(seed=2)
    assert model.sim is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.sim.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def teacher(new_model: Callable[..., WorldModel]) -> WorldModel:
    return new_model(seed=1, sim_condition=False).eval().requires_grad_(False)


@pytest.fixture
def batch(new_clips: Callable[..., LatentClips]) -> Batch:
    return new_clips().take(torch.tensor([0, 3, 5, 8]))


def drawn(model: WorldModel, batch: Batch, config: ObjectiveConfig = ObjectiveConfig(), seed: int = 3) -> Draws:
    return draw(model, batch.latents, config, torch.Generator().manual_seed(seed))


def with_other_first_frame(model: WorldModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the velocity of frame 0 is another one."""
    denoise = model.denoise

    def changed(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        velocity = denoise(x, *rest, **more).clone()
        velocity[:, :, 0] += 10 * torch.arange(1.0, len(x) + 1).view(-1, 1, 1, 1)
        return velocity

    monkeypatch.setattr(model, "denoise", changed)


@pytest.mark.parametrize("clean", [True, False])
def test_velocity_of_the_first_frame_matters_only_in_the_released_motion_loss(
    student: WorldModel, teacher: WorldModel, batch: Batch, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    config = ObjectiveConfig(clean_first_frame=clean)
    draws = drawn(student, batch)
    before = student_loss(student, teacher, batch, draws, config)
    with_other_first_frame(student, monkeypatch)
    with_other_first_frame(teacher, monkeypatch)
    after = student_loss(student, teacher, batch, draws, config)
    for name in ("flow_real", "flow_syn"):
        assert float(after[name].detach()) == float(before[name].detach())
    for name in ("motion_real", "motion_syn"):
        assert (float(after[name].detach()) == float(before[name].detach())) == clean, name


def test_clean_first_frame_makes_the_first_motion_start_at_the_given_latent() -> None:
    g = torch.Generator().manual_seed(0)
    clean, noise, v = torch.randn(3, 2, 3, 4, 2, 2, generator=g)
    sigma = torch.tensor([0.25, 0.9])
    x = clean + sigma.view(-1, 1, 1, 1, 1) * (noise - clean)
    true = motion(x, noise - clean, sigma, clean)
    torch.testing.assert_close(true, clean[:, :, 1:] - clean[:, :, :-1], atol=1e-5, rtol=0)
    estimate = x - sigma.view(-1, 1, 1, 1, 1) * v
    torch.testing.assert_close(motion(x, v, sigma, clean)[:, :, 0], estimate[:, :, 1] - clean[:, :, 0])
    torch.testing.assert_close(motion(x, v, sigma, None)[:, :, 0], estimate[:, :, 1] - estimate[:, :, 0])


def test_without_gates_the_simulation_is_not_seen_and_its_projections_get_no_gradient(
    student: WorldModel, teacher: WorldModel, batch: Batch
) -> None:
    draws = drawn(student, batch)
    closed = draws._replace(gate=torch.zeros_like(draws.gate))
    terms = student_loss(student, teacher, batch, closed, ObjectiveConfig())
    terms["total"].backward()
    assert student.sim is not None
    assert all(p.grad is not None and not p.grad.any() for p in student.sim.parameters())
    assert student.video.proj_out.weight.grad is not None
    assert bool(student.video.proj_out.weight.grad.any())
    other = closed._replace(keep=closed.keep * 7)
    again = student_loss(student, teacher, batch, other, ObjectiveConfig())
    assert float(again["total"].detach()) == float(terms["total"].detach())
    opened = draws._replace(gate=torch.ones_like(draws.gate))
    seeing = student_loss(student, teacher, batch, opened, ObjectiveConfig())
    assert float(seeing["flow_real"].detach()) != float(terms["flow_real"].detach())
    assert float(seeing["flow_syn"].detach()) == float(terms["flow_syn"].detach())


def test_student_that_is_still_its_teacher_has_no_motion_loss_in_simulation(teacher: WorldModel, batch: Batch) -> None:
    grown = teacher.with_sim_condition()
    terms = student_loss(grown, teacher, batch, drawn(grown, batch), ObjectiveConfig())
    assert float(terms["motion_syn"].detach()) == pytest.approx(0, abs=1e-10)
    assert float(terms["motion_real"].detach()) > 1e-3


def test_each_branch_reads_its_own_prompt(student: WorldModel, teacher: WorldModel, batch: Batch) -> None:
    draws, config = drawn(student, batch), ObjectiveConfig()
    before = student_loss(student, teacher, batch, draws, config)
    assert batch.sim_text is not None
    sim = student_loss(student, teacher, batch._replace(sim_text=batch.sim_text + 1), draws, config)
    real = student_loss(student, teacher, batch._replace(text=batch.text + 1), draws, config)
    assert float(sim["flow_real"].detach()) == float(before["flow_real"].detach())
    assert float(sim["flow_syn"].detach()) != float(before["flow_syn"].detach())
    assert float(real["flow_syn"].detach()) == float(before["flow_syn"].detach())
    assert float(real["flow_real"].detach()) != float(before["flow_real"].detach())


def test_weights_of_the_total() -> None:
    config = ObjectiveConfig()
    weights = (config.video_weight, config.motion_weight, config.real_weight, config.syn_weight)
    assert weights == (1.0, 0.5, 1.0, 0.1)
    assert (config.retention, config.corrupt_probability) == (0.7, 0.4)


def test_total_is_the_weighted_sum(student: WorldModel, teacher: WorldModel, batch: Batch) -> None:
    config = ObjectiveConfig(video_weight=2.0, motion_weight=3.0, real_weight=0.5, syn_weight=0.25)
    terms = student_loss(student, teacher, batch, drawn(student, batch), config)
    flow = 0.25 * terms["flow_real"] + 0.125 * terms["flow_syn"]
    moved = 0.25 * terms["motion_real"] + 0.125 * terms["motion_syn"]
    torch.testing.assert_close(terms["total"], 2 * flow + 3 * moved)


@pytest.mark.parametrize(("share", "count"), [(0.5, 2), (0.25, 1), (0.0, 1), (1.0, 4)])
def test_a_share_of_the_simulated_branch_is_that_branch_on_fewer_samples(
    student: WorldModel, teacher: WorldModel, batch: Batch, share: float, count: int
) -> None:
    draws = drawn(student, batch)
    whole = student_loss(student, teacher, batch, draws, ObjectiveConfig())
    part = student_loss(student, teacher, batch, draws, ObjectiveConfig(syn_share=share))
    few = Batch(*(None if x is None else x[:count] for x in batch))
    alone = student_loss(student, teacher, few, Draws(*(x[:count] for x in draws)), ObjectiveConfig())
    for kind in ("flow", "motion"):
        torch.testing.assert_close(part[f"{kind}_real"], whole[f"{kind}_real"])
        torch.testing.assert_close(part[f"{kind}_syn"], alone[f"{kind}_syn"])


def test_a_student_needs_pairs(student: WorldModel, teacher: WorldModel, batch: Batch) -> None:
    with pytest.raises(SimForcingError, match="paired"):
        student_loss(student, teacher, batch._replace(sim_latents=None), drawn(student, batch), ObjectiveConfig())


# -- draws --------------------------------------------------------------------------------------------------------


def many(**changes: Any) -> ObjectiveConfig:
    return replace(ObjectiveConfig(), **changes)


LATENTS = torch.zeros(4096, 1, 2, 1, 1)


def test_draws_follow_from_the_generator_alone(student: WorldModel, batch: Batch) -> None:
    a, b, other = drawn(student, batch), drawn(student, batch), drawn(student, batch, seed=4)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a.noise, other.noise)
    assert not torch.equal(a.timestep, other.timestep)


def test_retention_is_the_share_of_open_gates(student: WorldModel) -> None:
    for retention in (0.0, 0.7, 1.0):
        gate = draw(student, LATENTS, many(retention=retention), torch.Generator().manual_seed(0)).gate
        assert set(gate.tolist()) <= {0.0, 1.0}
        assert float(gate.mean()) == pytest.approx(retention, abs=0.03 if 0 < retention < 1 else 0)


def test_retention_changes_no_other_draw(student: WorldModel, batch: Batch) -> None:
    a, b = (drawn(student, batch, many(retention=r)) for r in (0.0, 1.0))
    assert all(torch.equal(x, y) for x, y in zip(a._replace(gate=b.gate), b, strict=True))


def test_corruption_keeps_and_spreads_within_its_bounds(student: WorldModel) -> None:
    for probability in (0.0, 0.4, 1.0):
        config = many(corrupt_probability=probability)
        draws = draw(student, LATENTS, config, torch.Generator().manual_seed(0))
        corrupted = draws.keep != 1
        share = float(corrupted.float().mean())
        assert share == pytest.approx(probability, abs=0.03 if 0 < probability < 1 else 0)
        assert not draws.spread[~corrupted].any()
        if probability:
            keep, ratio = draws.keep[corrupted], (draws.spread / (1 - draws.keep))[corrupted]
            for values, low, high in ((keep, 0.5, 0.9), (ratio, 0.1, 0.3)):
                assert low - 1e-5 <= float(values.min()) < low + 0.02
                assert high - 0.02 < float(values.max()) <= high + 1e-5


def test_times_are_shifted_uniform_numbers(student: WorldModel) -> None:
    draws = draw(student, LATENTS, ObjectiveConfig(), torch.Generator().manual_seed(0))
    assert draws.timestep.dtype == torch.float32
    assert 0 <= float(draws.timestep.min()) < 20
    assert 999 < float(draws.timestep.max()) <= 1000
    assert float(draws.timestep.median()) == pytest.approx(833.3, abs=12)


@pytest.mark.parametrize("name", ["retention", "corrupt_probability"])
@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan])
def test_a_probability_outside_its_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(SimForcingError, match=f"{name} = {value}"):
        ObjectiveConfig(**{name: value})
