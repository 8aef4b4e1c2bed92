"""Actions from observations: the cached computation against the full one, batches, seeds, bad input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simforcing.errors import InputError
from simforcing.policy.objective import Batch, draw, predicted
from simforcing.policy.policy import Policy
from simforcing.policy.sampler import Noise, Observation, SamplerConfig, remember, sample, start_noise

SAME: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
VARIANTS = ("first-frame", "joint", "idm")


def seen_of(batch: Batch) -> Observation:
    return Observation(batch.latents[:, :, :1], batch.text, batch.text_mask, batch.proprio)


def noise_of(policy: Policy, batch: Batch, video: bool = True) -> Noise:
    return start_noise(policy, batch.latents[:, :, :1], list(range(len(batch.latents))), video)


def recomputed(policy: Policy, batch: Batch, noise: Noise, steps: int, full: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Sampling without any cache: all tokens of both experts pass in every step."""
    context, mask = policy.context(batch.text, batch.text_mask, batch.proprio)
    first, a, rows = batch.latents[:, :, :1], noise.action, len(batch.latents)
    assert noise.video is not None
    x = torch.cat([first, noise.video[:, :, 1:]], dim=2)

    def moved(x: Tensor, velocity: Tensor, delta: Tensor) -> Tensor:
        return torch.cat([first, (x + delta * velocity)[:, :, 1:]], dim=2)

    schedule = list(zip(*policy.flow.steps(steps), strict=True))
    if policy.config.variant == "idm":
        for t, delta in schedule:
            x = moved(x, full(policy, [(x, t.expand(rows))], a, t.expand(rows), context, mask)[0], delta)
    for t, delta in schedule:
        time = t.expand(rows)
        video_time = torch.zeros(rows) if policy.config.variant == "idm" else time
        video, action = full(policy, [(x, video_time)], a, time, context, mask)
        a = a + delta * action
        if policy.config.variant != "idm":
            x = moved(x, video, delta)
    return a, x


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("positions", ["index", "frame"])
@pytest.mark.parametrize("masked", [False, True])
def test_cached_equals_full(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], full: Callable[..., Any],
    variant: str, positions: str, masked: bool,
) -> None:  # fmt: skip
    policy, given = tiny(variant=variant, action_positions=positions), batch(masked=masked)
    noise = noise_of(policy, given)
    found = sample(policy, remember(policy, seen_of(given)), noise, SamplerConfig(3))
    action, video = recomputed(policy, given, noise, 3, full)
    torch.testing.assert_close(found.action, action, **SAME)
    torch.testing.assert_close(found.video, video, **SAME)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_sees_what_the_full_computation_sees(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], full: Callable[..., Any], variant: str
) -> None:
    """Of `idm`, with the watched copy between the video and the actions, one of them noisy and one clean."""
    from simforcing.policy.objective import PolicyObjective

    policy, given = tiny(variant=variant), batch(masked=True)
    draws = draw(policy, given, PolicyObjective(), torch.Generator().manual_seed(3))
    if variant == "idm":
        draws = draws._replace(watched_timestep=torch.tensor([600.0, 0.0]))
    found = predicted(policy, given, draws)
    context, mask = policy.context(given.text, given.text_mask, given.proprio)

    def noisy(noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        s = (t / 1000).view(-1, 1, 1, 1, 1)
        return torch.cat([given[0][:, :, :1], ((1 - s) * given[0] + s * noise)[:, :, 1:]], dim=2), t

    copies = [noisy(draws.noise, draws.timestep)]
    if draws.watched_timestep is not None and draws.watched_noise is not None:
        copies.append(noisy(draws.watched_noise, draws.watched_timestep))
    s = (draws.action_timestep / 1000).view(-1, 1, 1)
    action = (1 - s) * given.action + s * draws.action_noise
    video, actions = full(policy, copies, action, draws.action_timestep, context, mask)
    torch.testing.assert_close(found.video, video[:, :, 1:], **SAME)
    torch.testing.assert_close(found.action, actions, **SAME)


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_equals_loop(tiny: Callable[..., Policy], batch: Callable[..., Batch], variant: str) -> None:
    policy, given = tiny(variant=variant), batch(rows=3, masked=True)
    noise = noise_of(policy, given)
    together = sample(policy, remember(policy, seen_of(given)), noise, SamplerConfig(2))
    for i in range(3):
        row = slice(i, i + 1)
        observation = Observation(*(t[row] for t in seen_of(given)))  # type: ignore[index]
        alone = start_noise(policy, observation.first, [i], True)
        assert torch.equal(alone.action, noise.action[row])
        one = sample(policy, remember(policy, observation), alone, SamplerConfig(2))
        torch.testing.assert_close(one.action, together.action[row], **SAME)
        torch.testing.assert_close(one.video, together.video[row], **SAME)


def test_a_first_frame_policy_acts_the_same_with_and_without_imagining(
    tiny: Callable[..., Policy], batch: Callable[..., Batch]
) -> None:
    policy, given = tiny(), batch()
    memory, noise = remember(policy, seen_of(given)), noise_of(policy, given)
    alone = sample(policy, memory, noise._replace(video=None))
    assert alone.video is None
    both = sample(policy, memory, noise)
    assert torch.equal(alone.action, both.action)
    assert both.video is not None
    assert torch.equal(both.video[:, :, :1], given.latents[:, :, :1])


def test_actions_follow_from_seed_and_proprioception(tiny: Callable[..., Policy], batch: Callable[..., Batch]) -> None:
    policy, given = tiny(), batch()
    memory = remember(policy, seen_of(given))
    noises = [start_noise(policy, memory.first, seeds, video) for seeds, video in (([5, 6], False), ([5, 6], True))]
    assert torch.equal(noises[0].action, noises[1].action)
    first, again = (sample(policy, memory, noise._replace(video=None)).action for noise in noises)
    assert torch.equal(first, again)
    other = sample(policy, memory, start_noise(policy, memory.first, [7, 6], False)).action
    assert not torch.allclose(other[0], first[0])
    assert torch.equal(other[1], first[1])
    unfelt = remember(policy, seen_of(given)._replace(proprio=None))
    assert not torch.allclose(sample(policy, unfelt, noises[0]).action, first)


def test_released_state_is_rounded(tiny: Callable[..., Policy], batch: Callable[..., Batch]) -> None:
    policy, given = tiny().bfloat16(), batch()
    memory, noise = remember(policy, seen_of(given)), noise_of(policy, given, video=False)
    rounded = sample(policy, memory, noise, SamplerConfig.released()).action
    assert torch.equal(rounded, rounded.bfloat16().float())
    exact = sample(policy, memory, noise).action
    assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first": torch.zeros(2, 3, 2, 4, 6)}, r"first has shape \[2, 3, 2, 4, 6\], it must be \[B, 3, 1, H, W\]"),
        ({"first": torch.full((2, 3, 1, 4, 6), torch.nan)}, "first of shape .* holds NaN"),
        ({"first": torch.zeros(2, 3, 1, 5, 6)}, "multiples of the patch"),
        ({"proprio": torch.zeros(2, 7)}, r"proprio has shape \[2, 7\], it must be \[2, 8\]"),
        ({"proprio": torch.full((2, 8), torch.inf)}, "proprio of shape .* holds NaN or infinite"),
        ({"text_mask": torch.zeros(2, 4, dtype=torch.bool)}, "text_mask of shape .* hides every token"),
    ],
)
def test_bad_observations(
    tiny: Callable[..., Policy], batch: Callable[..., Batch], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        remember(tiny(), seen_of(batch())._replace(**change))


def test_bad_noise(tiny: Callable[..., Policy], batch: Callable[..., Batch]) -> None:
    policy, given = tiny(variant="joint"), batch()
    memory, noise = remember(policy, seen_of(given)), noise_of(policy, given)
    with pytest.raises(InputError, match="variant joint looks at the video that it imagines"):
        sample(policy, memory, noise._replace(video=None))
    with pytest.raises(InputError, match=r"action noise has shape \[2, 4, 7\], it must be \[2, 8, 7\]"):
        sample(policy, memory, noise._replace(action=noise.action[:, :4]))
    with pytest.raises(InputError, match="video noise has shape"):
        sample(policy, memory, noise._replace(video=given.latents[:, :, :2]))
    with pytest.raises(InputError, match="1 seeds for 2 observations"):
        start_noise(policy, memory.first, [1], False)
