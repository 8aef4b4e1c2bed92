"""What the objective promises: its corrections, its terms, what gets a gradient, its draws."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simforcing.errors import InputError, SimForcingError
from simforcing.model.world_model import WorldModel
from simforcing.train.batches import LatentClips
from simforcing.train.objective import (
    Batch,
    Draws,
    ObjectiveConfig,
    draw,
    estimate,
    flow_error,
    motion_error,
    noisy,
    padded_frames,
    single_domain_loss,
    student_loss,
)

MOTION = ("motion_real", "motion_syn")


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


def numbers(terms: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value.detach()) for name, value in terms.items()}


def with_other_proprio(model: WorldModel) -> WorldModel:
    """A copy whose proprioception encoder has other weights."""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.proprio.weight.add_(1.0)
    return other


# -- corrections ----------------------------------------------------------------------------------------------------


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
    torch.testing.assert_close(estimate(x, noise - clean, sigma, None), clean, atol=1e-5, rtol=0)
    guess = x - sigma.view(-1, 1, 1, 1, 1) * v
    assert torch.equal(estimate(x, v, sigma, clean)[:, :, 0], clean[:, :, 0])
    torch.testing.assert_close(estimate(x, v, sigma, clean)[:, :, 1:], guess[:, :, 1:])
    torch.testing.assert_close(estimate(x, v, sigma, None), guess)
    dropped = estimate(x, v, sigma, clean, torch.tensor([True, False]))
    assert torch.equal(dropped[0, :, 0], clean[0, :, 0])
    torch.testing.assert_close(dropped[1], guess[1])


@pytest.mark.parametrize("own", [True, False])
def test_teacher_does_not_move_with_the_students_proprioception_encoder(
    teacher: WorldModel, batch: Batch, own: bool
) -> None:
    """The student's weights are the teacher's, so all motion loss in simulation comes from that encoder."""
    student = with_other_proprio(teacher).with_sim_condition()
    config = ObjectiveConfig(own_teacher_proprio=own)
    found = numbers(student_loss(student, teacher, batch, drawn(student, batch), config))
    assert (found["motion_syn"] > 1e-6) == own
    other = with_other_proprio(teacher)
    again = numbers(student_loss(student, other, batch, drawn(student, batch), config))
    assert (again["motion_syn"] == found["motion_syn"]) != own


def test_each_branch_and_the_teacher_read_the_prompt_of_their_domain(
    student: WorldModel, teacher: WorldModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[Tensor]] = {}
    for name, model in (("student", student), ("teacher", teacher)):

        def watched(text: Tensor, *rest: Tensor, name: str = name, embed: Any = model.context) -> Any:
            read.setdefault(name, []).append(text)
            return embed(text, *rest)

        monkeypatch.setattr(model, "context", watched)
    student_loss(student, teacher, batch, drawn(student, batch), ObjectiveConfig())
    assert batch.sim_text is not None
    assert not torch.equal(batch.sim_text, batch.text)
    assert torch.equal(torch.cat(read["teacher"]), batch.sim_text)
    assert torch.equal(torch.cat(read["student"]), torch.cat([batch.text, batch.sim_text]))


@pytest.mark.parametrize("training", [True, False])
def test_dropped_actions_are_zeros_whatever_mode_the_model_is_in(
    student: WorldModel, teacher: WorldModel, batch: Batch, training: bool
) -> None:
    """Not an absent action expert, also where the whole batch is dropped; and the teacher's are never dropped."""
    student.train(training)
    config = ObjectiveConfig(action_dropout=1.0)
    draws = drawn(student, batch, config)
    assert draws.action_kept is not None
    assert not draws.action_kept.any()
    still = batch._replace(action=torch.zeros_like(batch.action))
    plain = draws._replace(action_kept=None)
    assert numbers(single_domain_loss(student, batch, draws)) == numbers(single_domain_loss(student, still, plain))
    found, zero = (student_loss(student, teacher, *a, config) for a in ((batch, draws), (still, plain)))
    for name in ("flow_real", "flow_syn"):
        assert float(found[name].detach()) == float(zero[name].detach())
    assert numbers(found)["motion_syn"] != numbers(zero)["motion_syn"]  # the teacher saw the actions
    some = draws._replace(action_kept=torch.tensor([True, False, True, False]))
    part = batch._replace(action=batch.action * torch.tensor([1.0, 0.0, 1.0, 0.0]).view(-1, 1, 1))
    assert numbers(single_domain_loss(student, batch, some)) == numbers(single_domain_loss(student, part, plain))


def test_dropouts_happen_as_often_as_they_say(student: WorldModel) -> None:
    config = ObjectiveConfig(action_dropout=0.1, first_frame_dropout=0.3)
    draws = draw(student, LATENTS, config, torch.Generator().manual_seed(0))
    assert draws.action_kept is not None
    assert draws.first_kept is not None
    assert float(draws.action_kept.float().mean()) == pytest.approx(0.9, abs=0.02)
    assert float(draws.first_kept.float().mean()) == pytest.approx(0.7, abs=0.02)
    none = draw(student, LATENTS, ObjectiveConfig(), torch.Generator().manual_seed(0))
    assert none.action_kept is none.first_kept is None


@pytest.mark.parametrize("true", [True, False])
def test_a_dropped_first_frame_is_noisy_and_has_the_time_of_its_noise(
    student: WorldModel, batch: Batch, monkeypatch: pytest.MonkeyPatch, true: bool
) -> None:
    draws = drawn(student, batch)._replace(first_kept=torch.tensor([True, False, False, True]))
    times: list[Tensor] = []
    embedder = student.video.condition_embedder
    embed = embedder.time
    monkeypatch.setattr(embedder, "time", lambda t: (times.append(t), embed(t))[1])
    single_domain_loss(student, batch, draws, ObjectiveConfig(true_first_time=true))
    kept = torch.tensor([0.0, 1.0, 1.0, 0.0]) if true else torch.zeros(4)
    assert torch.equal(times[0], torch.stack([kept * draws.timestep, draws.timestep], dim=1))
    x = noisy(batch.latents, draws, student.flow.train_steps, draws.first_kept)
    whole = noisy(batch.latents, draws, student.flow.train_steps, torch.zeros(4, dtype=torch.bool))
    assert torch.equal(x[[0, 3], :, 0], batch.latents[[0, 3], :, 0])
    assert torch.equal(x[[1, 2], :, 0], whole[[1, 2], :, 0])
    assert torch.equal(x[:, :, 1:], whole[:, :, 1:])
    sigma = (draws.timestep / 1000).view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(whole, (1 - sigma) * batch.latents + sigma * draws.noise)


@pytest.mark.parametrize("mask", [True, False])
def test_padded_frames_are_left_out_of_both_losses(
    student: WorldModel, teacher: WorldModel, batch: Batch, monkeypatch: pytest.MonkeyPatch, mask: bool
) -> None:
    pad = torch.zeros(4, 3, dtype=torch.bool)
    pad[2, 2] = True
    draws, config = drawn(student, batch), ObjectiveConfig(mask_motion=mask)
    before = numbers(student_loss(student, teacher, batch._replace(padded=pad), draws, config))
    denoise = student.denoise

    def changed(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        velocity = denoise(x, *rest, **more).clone()
        velocity.unflatten(0, (2, 4))[:, 2, :, 2] += 10  # of both branches
        return velocity

    monkeypatch.setattr(student, "denoise", changed)
    after = numbers(student_loss(student, teacher, batch._replace(padded=pad), draws, config))
    for name in ("flow_real", "flow_syn"):
        assert after[name] == before[name]
    for name in MOTION:
        assert (after[name] == before[name]) == mask
    unpadded = numbers(student_loss(student, teacher, batch, draws, config))
    for name in ("flow_real", "flow_syn", *(MOTION if mask else ())):
        assert unpadded[name] != after[name]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 6), last=st.integers(0, 24), stride=st.sampled_from([1, 2, 4]))
def test_a_latent_frame_is_padded_where_all_its_pixel_frames_are(n: int, last: int, stride: int) -> None:
    pixels = torch.zeros(2, 1 + stride * n, dtype=torch.bool)
    padded = min(last, stride * n)
    pixels[1, 1 + stride * n - padded :] = True
    found = padded_frames(pixels, stride)
    assert found.shape == (2, n + 1)
    assert not found[0].any()
    assert int(found[1].sum()) == padded // stride
    assert torch.equal(found[1].int().diff().clamp(max=0), torch.zeros(n, dtype=torch.int32))


def test_padding_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"image_is_pad has shape \[2, 8\], it must be \[2, 9\]"):
        padded_frames(torch.zeros(2, 8, dtype=torch.bool))


def test_a_clip_that_is_all_padding_counts_as_no_error() -> None:
    a, b = torch.randn(2, 1, 2, 3, 2, 2)
    pad = torch.tensor([[False, True, True]])
    assert float(motion_error(a, b, ObjectiveConfig(), pad)) == 0
    assert float(flow_error(a, b, 0 * b, pad)) == 0
    assert float(motion_error(a, b, ObjectiveConfig(mask_motion=False), pad)) > 0


@pytest.mark.parametrize("float32", [True, False])
def test_times_are_float32_whatever_the_weights_are(student: WorldModel, float32: bool) -> None:
    config = ObjectiveConfig(float32_time=float32)
    found = draw(student.bfloat16(), LATENTS, config, torch.Generator().manual_seed(0)).timestep
    assert found.dtype == torch.float32
    assert bool((found == found.bfloat16()).all()) != float32
    assert len(found.unique()) > 4000 if float32 else len(found.unique()) < 1000


def test_released_turns_every_correction_off() -> None:
    corrections = ("clean_first_frame", "own_teacher_proprio", "mask_motion", "true_first_time", "float32_time")
    assert all(getattr(ObjectiveConfig(), name) for name in corrections)
    assert ObjectiveConfig.released(syn_weight=0.3) == many(syn_weight=0.3, **dict.fromkeys(corrections, False))


# -- terms ----------------------------------------------------------------------------------------------------------


def test_one_text_for_both_branches_is_embedded_once_and_gives_the_same_loss_and_gradients(
    student: WorldModel, teacher: WorldModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = batch._replace(sim_text=None, sim_text_mask=None)
    equal = batch._replace(sim_text=batch.text.clone(), sim_text_mask=batch.text_mask)
    draws, found, rows = drawn(student, batch), [], []
    embed = student.condition
    monkeypatch.setattr(student, "condition", lambda a, *rest: (rows.append(len(a)), embed(a, *rest))[1])
    for given_ in (once, equal):
        student.zero_grad()
        terms = student_loss(student, teacher, given_, draws, ObjectiveConfig())
        terms["total"].backward()
        found.append(numbers(terms) | {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None})
    assert rows == [4, 8]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bell", "low_noise", "flat"])
@pytest.mark.parametrize("target", ["difference", "value"])
def test_motion_is_compared_as_it_says(
    student: WorldModel, teacher: WorldModel, batch: Batch, kind: Any, target: Any
) -> None:
    """The term, recomputed from the estimates of both networks."""
    config = ObjectiveConfig(motion_sigma=kind, motion_target=target, motion_pool=2, motion_when_conditioned=0.25)
    draws = drawn(student, batch)._replace(gate=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    terms = student_loss(student, teacher, batch, draws, config)
    sigma, steps = draws.timestep / 1000, student.flow.train_steps
    guesses = []
    for model, side, sim in ((teacher, batch.simulated(), None), (student, batch, batch.sim_latents)):
        x = noisy(side.latents, draws, steps)
        context, mask = model.context(side.text, side.text_mask, side.proprio)
        reference = (
            None
            if sim is None
            else draws.keep.view(-1, 1, 1, 1, 1) * sim + draws.spread.view(-1, 1, 1, 1, 1) * draws.corruption
        )
        gate = None if sim is None else draws.gate
        v = model.velocity(x, draws.timestep, side.action, context, mask, reference, gate)
        guess = x - sigma.view(-1, 1, 1, 1, 1) * v
        guess[:, :, 0] = side.latents[:, :, 0]
        guesses.append(guess.diff(dim=2) if target == "difference" else guess)
    pooled = [g.unflatten(-1, (2, 2)).unflatten(-3, (2, 2)).mean((-1, -3)) for g in guesses]
    error = (pooled[0] - pooled[1]).square().flatten(1).mean(1)
    weight = {"bell": student.flow.weight(draws.timestep), "low_noise": 1 - sigma, "flat": torch.ones(4)}[kind]
    expected = (weight * error * torch.tensor([0.25, 1.0, 0.25, 0.25])).mean()
    torch.testing.assert_close(terms["motion_real"], expected, atol=1e-5, rtol=1e-4)


def test_simulated_branch_sees_the_simulation_only_where_it_is_asked_to(
    student: WorldModel, teacher: WorldModel, batch: Batch
) -> None:
    draws = drawn(student, batch)._replace(gate=torch.ones(4))
    plain, seeing = (
        numbers(student_loss(student, teacher, batch, draws, ObjectiveConfig(condition_syn=c))) for c in (False, True)
    )
    assert seeing["flow_real"] == pytest.approx(plain["flow_real"], rel=1e-5)
    assert abs(seeing["flow_syn"] - plain["flow_syn"]) > 1e-5
    other = batch._replace(sim_latents=None if batch.sim_latents is None else batch.sim_latents.clone())
    assert numbers(student_loss(student, teacher, other, draws, ObjectiveConfig())) == plain


def test_weights_of_motion_may_be_its_own(student: WorldModel, teacher: WorldModel, batch: Batch) -> None:
    config = ObjectiveConfig(motion_real_weight=0.7, motion_syn_weight=0.2)
    terms = student_loss(student, teacher, batch, drawn(student, batch), config)
    flow = 0.5 * terms["flow_real"] + 0.05 * terms["flow_syn"]
    torch.testing.assert_close(terms["total"], flow + 0.5 * (0.35 * terms["motion_real"] + 0.1 * terms["motion_syn"]))


@pytest.mark.parametrize("dropouts", [0.0, 0.5])
@pytest.mark.parametrize("shared_text", [True, False])
def test_a_step_never_waits_for_the_device(
    student: WorldModel, teacher: WorldModel, batch: Batch, dropouts: float, shared_text: bool
) -> None:
    """On the meta device, whose numbers cannot be looked at; gates and text masks lie on the host."""
    host = {"text_mask", "sim_text_mask"}
    parts = {k: v if v is None or k in host else v.to("meta") for k, v in batch._asdict().items()}
    parts |= {"sim_text": None, "sim_text_mask": None} if shared_text else {}
    parts["padded"] = torch.zeros(4, 3, dtype=torch.bool, device="meta")
    far = Batch(**parts)
    student, teacher = student.to("meta"), teacher.to("meta")
    config = ObjectiveConfig(action_dropout=dropouts, first_frame_dropout=dropouts, condition_syn=dropouts > 0)
    draws = draw(student, far.latents, config, torch.Generator().manual_seed(3))
    assert draws.gate.device.type == "cpu"
    draws = draws._replace(gate=torch.tensor([1.0, 0.0, 0.0, 1.0]))
    terms = student_loss(student, teacher, far, draws, config) | {
        "single": single_domain_loss(student, far, draws, config)["total"]
    }
    (terms["total"] + terms["single"]).backward()
    assert all(term.is_meta for term in terms.values())
    assert all(p.grad is not None for n, p in student.named_parameters() if n not in dict(student.unused_parameters()))
    with pytest.raises(RuntimeError, match="meta"):
        float(terms["total"].detach())


def test_without_gates_the_simulation_is_not_seen_and_its_projections_get_no_gradient(
    student: WorldModel, teacher: WorldModel, batch: Batch
) -> None:
    draws = drawn(student, batch)
    closed = draws._replace(gate=torch.zeros_like(draws.gate))
    terms = student_loss(student, teacher, batch, closed, ObjectiveConfig())
    terms["total"].backward()
    assert student.sim is not None
    assert all(p.grad is None or not p.grad.any() for p in student.sim.parameters())
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
    alone = student_loss(student, teacher, few, draws.some(count), ObjectiveConfig())
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
    assert all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a.noise, other.noise)
    assert not torch.equal(a.timestep, other.timestep)


def test_retention_is_the_share_of_open_gates(student: WorldModel) -> None:
    for retention in (0.0, 0.7, 1.0):
        gate = draw(student, LATENTS, many(retention=retention), torch.Generator().manual_seed(0)).gate
        assert set(gate.tolist()) <= {0.0, 1.0}
        assert float(gate.mean()) == pytest.approx(retention, abs=0.03 if 0 < retention < 1 else 0)


def test_retention_changes_no_other_draw(student: WorldModel, batch: Batch) -> None:
    a, b = (drawn(student, batch, many(retention=r)) for r in (0.0, 1.0))
    assert all(x is y or torch.equal(x, y) for x, y in zip(a._replace(gate=b.gate), b, strict=True))


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


@pytest.mark.parametrize(
    "name", ["retention", "corrupt_probability", "syn_share", "action_dropout", "first_frame_dropout"]
)
@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan])
def test_a_probability_outside_its_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(SimForcingError, match=f"{name} = {value}"):
        ObjectiveConfig(**{name: value})
