"""The losses of a policy: padding, weights, draws, settings, what is trained in each."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simforcing.errors import InputError, SimForcingError
from simforcing.policy.objective import (
    Batch,
    PolicyObjective,
    action_error,
    check_batch,
    draw,
    policy_loss,
    predicted,
    video_error,
)
from simforcing.policy.policy import Policy, Variant
from simforcing.policy.settings import SETTINGS, PolicyLoss, SettingName, prepare, train
from simforcing.train.config import TrainConfig
from simforcing.train.optim import make_optimizer
from simforcing.train.parallel import Arrangement, Team, arranged

ACTION_ALONE = PolicyObjective(video_weight=0.0)


def generators(rows: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(rows)]


# -- errors ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_padded_steps_do_not_count(padding: list[list[bool]]) -> None:
    padded = torch.tensor(padding)
    g = torch.Generator().manual_seed(0)
    velocity, clean, noise = torch.randn(3, len(padded), 5, 7, generator=g)
    found = action_error(velocity, clean, noise, padded)
    changed = torch.where(padded[..., None], velocity + 9, velocity)
    assert torch.equal(action_error(changed, clean, noise, padded), found)
    for row, pad in enumerate(padded):
        error = (velocity - noise + clean)[row].square().mean(1)[~pad]
        assert float(found[row]) == pytest.approx(float(error.mean()) if len(error) else 0.0, rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=3, max_size=3))
def test_padded_frames_and_the_first_do_not_count(later: list[bool]) -> None:
    padded = torch.tensor([[True, *later]])
    g = torch.Generator().manual_seed(0)
    velocity = torch.randn(1, 2, 3, 4, 4, generator=g)
    clean, noise = torch.randn(2, 1, 2, 4, 4, 4, generator=g)
    errors = [float((velocity[:, :, i] - (noise - clean)[:, :, i + 1]).square().mean()) for i in range(3)]
    valid = [error for error, pad in zip(errors, later, strict=True) if not pad]
    expected = sum(valid) / max(len(valid), 1)
    assert float(video_error(velocity, clean, noise, padded)) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("variant", get_args(Variant))
def test_a_loss_is_the_mean_over_its_samples(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], variant: str
) -> None:
    """Each drawn and computed alone, whatever else is in its batch; a fully padded sample counts as zero."""
    policy, whole, loss = tiny(variant=variant), batch(rows=3), PolicyLoss()
    whole = whole._replace(action_padded=torch.tensor([[False] * 8, [True] * 8, [False] * 5 + [True] * 3]))
    terms = loss(policy, whole, loss.draw(policy, whole, generators(3)))
    alone = []
    for i, generator in enumerate(generators(3)):
        row = Batch(*(None if t is None else t[i : i + 1] for t in whole))  # type: ignore[arg-type]
        alone.append(loss(policy, row, loss.draw(policy, row, [generator])))
    for name, term in terms.items():
        assert float(term) == pytest.approx(sum(float(one[name]) for one in alone) / 3, rel=1e-4)
    assert float(alone[1]["action"]) == 0


# -- what is looked at ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_actions_see_what_their_variant_says(tiny: Callable[..., Policy], batch: Callable[..., Batch]) -> None:
    base = batch()
    later = base._replace(latents=torch.cat([base.latents[:, :, :1], base.latents[:, :, 1:] + 1], dim=2))
    sees = {}
    for variant in get_args(Variant):
        policy = tiny(variant=variant)
        draws = draw(policy, base, PolicyObjective(), torch.Generator().manual_seed(0))
        one, other = (predicted(policy, b, draws) for b in (base, later))
        sees[variant] = not torch.equal(one.action, other.action)
        moved = predicted(policy, base._replace(action=base.action + 1), draws)
        assert torch.equal(moved.video, one.video), "video sees no actions"
    assert sees == {"first-frame": False, "joint": True, "idm": True}


@torch.no_grad()
def test_the_watched_copy_of_idm(tiny: Callable[..., Policy], batch: Callable[..., Batch]) -> None:
    """Actions see the copy and not the noisy video; its noise does not matter where it is clean."""
    policy, given = tiny(variant="idm"), batch()
    draws = draw(policy, given, PolicyObjective(watched_noise=0.0), torch.Generator().manual_seed(0))
    assert draws.watched_timestep is not None and not draws.watched_timestep.any()
    base = predicted(policy, given, draws)
    other = predicted(policy, given, draws._replace(noise=draws.noise + 1, watched_noise=draws.noise))
    assert torch.equal(other.action, base.action)
    assert not torch.allclose(other.video, base.video)
    noisy = predicted(policy, given, draws._replace(watched_timestep=torch.tensor([500.0, 0.0])))
    assert not torch.allclose(noisy.action[0], base.action[0])
    torch.testing.assert_close(noisy.action[1], base.action[1])
    assert torch.equal(noisy.video, base.video)
    with pytest.raises(InputError, match="needs draws for the copy"):
        predicted(policy, given, draws._replace(watched_noise=None))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_how_often_the_watched_copy_is_noisy(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], share: float
) -> None:
    policy, given = tiny(variant="idm"), batch(rows=400)
    draws = draw(policy, given, PolicyObjective(watched_noise=share), torch.Generator().manual_seed(0))
    assert draws.watched_timestep is not None
    assert float((draws.watched_timestep > 0).float().mean()) == pytest.approx(share, abs=0.07)


def test_times_of_video_and_actions_are_drawn_apart(tiny: Callable[..., Policy], batch: Callable[..., Batch]) -> None:
    policy, given = tiny(), batch(rows=300)
    draws = draw(policy, given, PolicyObjective(), torch.Generator().manual_seed(0))
    both = torch.stack([draws.timestep, draws.action_timestep])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.15
    rounded = draw(policy.bfloat16(), given, PolicyObjective(float32_time=False), torch.Generator().manual_seed(0))
    assert torch.equal(rounded.timestep, draws.timestep.bfloat16().float())


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", get_args(SettingName))
@pytest.mark.parametrize("variant", get_args(Variant))
def test_what_a_setting_trains_gets_a_gradient_and_nothing_else(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], name: Any, variant: Any
) -> None:
    policy, given = tiny(variant=variant), batch()
    if variant not in SETTINGS[name].variants:
        with pytest.raises(SimForcingError, match=f"setting {name} trains policies of variant"):
            prepare(policy, name)
        return
    loss = PolicyLoss(prepare(policy, name))
    loss(policy, given, loss.draw(policy, given, generators(2)))["total"].backward()
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in policy.named_parameters() if p.grad is not None and bool(p.grad.any())}
    frozen = {n for n, _ in policy.named_parameters()} - trained
    video = {n for n, _ in policy.named_parameters() if n.startswith("video.")}
    assert frozen == (video if name == "action-only" else set())


@pytest.mark.parametrize("variant", get_args(Variant))
def test_with_the_action_loss_alone_what_it_does_not_reach_is_frozen(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], variant: str
) -> None:
    policy, given = tiny(variant=variant), batch()
    train(policy, True, ACTION_ALONE)
    draws = draw(policy, given, ACTION_ALONE, torch.Generator().manual_seed(0))
    terms = policy_loss(policy, given, draws, ACTION_ALONE)
    assert set(terms) == {"action", "total"}
    terms["total"].backward()
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None and bool(parameter.grad.any())), name


def test_the_first_frame_is_enough_where_nothing_else_is_looked_at(
    tiny: Callable[..., Policy], batch: Callable[..., Batch]
) -> None:
    policy, given, loss = tiny(), batch(), PolicyLoss(ACTION_ALONE)
    first = given._replace(latents=given.latents[:, :, :1])
    draws = loss.draw(policy, given, generators(2))
    short = draws._replace(noise=draws.noise[:, :, :1])
    whole, alone = (loss(policy, b, d)["total"] for b, d in ((given, draws), (first, short)))
    torch.testing.assert_close(whole, alone)
    assert loss.draw(policy, first, generators(2)).noise.shape == (2, 3, 1, 4, 6)
    with pytest.raises(InputError, match="latents have 1 frames, they must have 3"):
        check_batch(policy.config, first)


def test_without_a_gradient_through_video_the_proprioception_gets_another(
    tiny: Callable[..., Policy], batch: Callable[..., Batch]
) -> None:
    policy, given = tiny(), batch()
    found, losses = [], []
    for through in (True, False):
        objective = PolicyObjective(video_weight=0.0, video_gradient=through)
        train(policy, False, objective)
        policy.zero_grad()
        draws = draw(policy, given, objective, torch.Generator().manual_seed(0))
        loss = policy_loss(policy, given, draws, objective)["total"]
        loss.backward()
        losses.append(float(loss.detach()))
        assert policy.proprio.weight.grad is not None
        found.append(policy.proprio.weight.grad.clone())
    assert losses[0] == losses[1]
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize(("variant", "name"), [("first-frame", "action-only"), ("joint", "both"), ("idm", "both")])
def test_blocks_may_be_computed_again_or_in_bfloat16(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], variant: Any, name: str
) -> None:
    """As the training loop arranges them: recomputed, the same gradients; in bfloat16, nearly."""
    given, found = batch(masked=True), []
    for arrangement in (Arrangement(), Arrangement(recompute=True), Arrangement(torch.bfloat16, True)):
        policy = tiny(variant=variant)
        loss = PolicyLoss(prepare(policy, "action-only") if name == "action-only" else PolicyObjective())
        trained, draws = arranged(policy, None, Team(), arrangement), loss.draw(policy, given, generators(2))
        trained(lambda model, loss=loss, draws=draws: loss(model, given, draws))["total"].backward()
        found.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[1], found[0])
    assert float(torch.cosine_similarity(found[2], found[0], dim=0)) > 0.999


def test_it_learns_under_the_loops_optimiser(tiny: Callable[..., Policy], batch: Callable[..., Batch]) -> None:
    policy, given = tiny().train(), batch()
    loss = PolicyLoss(prepare(policy, "action-only"))
    before = {n: p.clone() for n, p in policy.named_parameters()}
    optimizer = make_optimizer(policy, TrainConfig(steps=15, lr=2e-2))
    draws, values = loss.draw(policy, given, generators(2)), []
    for _ in range(15):
        terms = loss(policy, given, draws)
        terms["total"].backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(terms["total"].detach()))
    assert values[-1] < 0.5 * values[0]
    unchanged = {n for n, p in policy.named_parameters() if torch.equal(p, before[n])}
    assert unchanged == {n for n in before if n.startswith("video.")}


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action": torch.zeros(2, 8, 6)}, r"action has shape \[2, 8, 6\], it must be \[2, 8, 7\]"),
        ({"action": torch.full((2, 8, 7), torch.nan)}, "action of shape .* holds NaN"),
        ({"proprio": torch.zeros(2, 7)}, "proprio has shape"),
        ({"latents": torch.zeros(2, 3, 4, 4, 6)}, "latents have 4 frames, they must have 3"),
        ({"latents": torch.zeros(2, 5, 3, 4, 6)}, "latents have shape"),
        ({"latents": torch.full((2, 3, 3, 4, 6), torch.inf)}, "latents of shape .* holds NaN or infinite"),
        ({"action_padded": torch.zeros(2, 7, dtype=torch.bool)}, "action_padded has shape"),
        ({"padded": torch.zeros(2, 4, dtype=torch.bool)}, "padded has shape"),
    ],
)
def test_bad_batches(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        PolicyLoss().draw(tiny(), batch()._replace(**change), generators(2))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"watched_noise": 1.5}, "watched_noise = 1.5: a probability"),
        ({"action_weight": 0.0}, "action_weight = 0.0"),
        ({"video_weight": -1.0}, "video_weight = -1.0"),
        ({"video_gradient": False}, "goes with video_weight = 0"),
    ],
)
def test_bad_objectives(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SimForcingError, match=words):
        PolicyObjective(**values)


def test_unknown_setting(tiny: Callable[..., Policy]) -> None:
    with pytest.raises(SimForcingError, match="setting 'both': there are action-only, unconditional, video-action"):
        prepare(tiny(), "both")  # type: ignore[arg-type]
