"""The policy: losses, gradients, sampled actions, masks, and LIBERO's numbers.

Reference variants: U first-frame, J joint, I inverse dynamics; what a case's other letters mean is in `CASES`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from torch import Tensor

from simforcing.data.stats import Normalizer
from simforcing.model.experts import ExpertConfig, KeysValues
from simforcing.model.flow import noised
from simforcing.model.released import our_name, our_state
from simforcing.model.world_model import load_strictly
from simforcing.policy.libero_numbers import GRIPPER, axis_angle, from_recording
from simforcing.policy.objective import (
    Batch,
    Draws,
    PolicyObjective,
    action_error,
    policy_loss,
    predicted,
    video_error,
)
from simforcing.policy.policy import Policy, PolicyConfig
from simforcing.policy.sampler import Memory, Noise, Observation, SamplerConfig, remember, sample
from simforcing.policy.settings import train
from simforcing.train.objective import padded_frames

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
SAMPLED: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
VARIANTS = {"U": "first-frame", "J": "joint", "I": "idm"}
ROLLOUTS = {"uncond": "first-frame", "uncond_joint": "first-frame", "joint": "joint", "idm": "idm"}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Padding of actions (`all`: every step) and images; whether the video expert is frozen."""

    objective: PolicyObjective = PolicyObjective()
    actions: str = ""
    images: bool = False
    frozen: bool = False


ACTION_ALONE = PolicyObjective(video_weight=0.0)
CASES = {
    "U": Case(), "J": Case(), "I": Case(),
    "UP": Case(actions="some"), "UPI": Case(actions="some", images=True), "JP": Case(actions="some", images=True),
    "UZ": Case(actions="all"), "UL": Case(PolicyObjective(0.3, 2.0), actions="some"),
    "UA": Case(ACTION_ALONE), "UF": Case(frozen=True),
    "UFA": Case(ACTION_ALONE, frozen=True), "JFA": Case(ACTION_ALONE, frozen=True),
    "UD": Case(PolicyObjective(video_weight=0.0, video_gradient=False), frozen=True),
}  # fmt: skip

CHECKED = (
    r"(mot|proprio_encoder|in|infer\.in|I\.in)\..+",
    r"mid\.(noisy|weight)_(video|action)",
    r"(?P<case>[A-Z]+)\.(out\.(loss_video|loss_action|total)|mid\.(video|action)_per_sample|grad(norm)?\..+)",
    r"[UJI]\.mid\.pred_(video|action)|I\.mid\.latents_cond|UD\.mid\.kv\.block0\.[kv]",
    r"mask\.(uncond|joint|idm_infer|uncond_first_frame_only|idm_train)",
    r"infer\.uncond\.n\d+(\.shift3|\.no_proprio)?\.action|infer\.uncond\.n\d+\.step\d+\.[vx]",
    r"infer\.uncond\.kv\.block\d+\.[kv]|infer\.(uncond_joint|joint|idm)\.n\d+\.video",
    r"infer\.(joint|idm)\.n\d+\.action|infer\.joint\.n\d+\.step\d+\.action_v|infer\.idm\.n\d+\.kv\.block0\.[kv]",
    r"libero\.(quat_xyzw|axisangle|action_(min|max|normalised|denormalised|env_not_binarised|env|renormalised))",
)
"""Names that the tests below look at."""


@pytest.fixture(scope="module")
def golden(read: Callable[[str], tuple[Tensors, Any]]) -> Tensors:
    return read("policy")[0]


@pytest.fixture
def policy(read: Callable[[str], tuple[Tensors, Any]]) -> Callable[[str], Policy]:
    """The reference's weights in a variant."""
    tensors, meta = read("policy")
    sizes = meta["config"]
    names = {"dim": "hidden_dim", "head_dim": "attn_head_dim"}
    fields = ("dim", "ffn_dim", "num_layers", "num_heads", "head_dim", "text_dim", "freq_dim", "eps")
    video, action = (ExpertConfig(**{f: sizes[e][names.get(f, f)] for f in fields}) for e in ("video", "action"))
    config = PolicyConfig(
        video, action, sizes["video"]["in_dim"], tuple(sizes["video"]["patch_size"]), sizes["action"]["action_dim"],
        tensors["proprio_encoder.weight"].shape[1], horizon=sizes["size"]["A"], frames=sizes["size"]["T"],
    )  # fmt: skip
    state = our_state({k: v for k, v in tensors.items() if k.startswith(("mot.", "proprio_encoder."))})

    def built(variant: str) -> Policy:
        model = Policy(replace(config, variant=variant))
        load_strictly(model, state, "the reference")
        return model.eval()

    return built


def batch_of(t: Tensors, case: Case = Case()) -> Batch:
    pad = {"": None, "some": t["in.action_is_pad"], "all": torch.ones_like(t["in.action_is_pad"])}[case.actions]
    padded = padded_frames(t["in.image_is_pad"]) if case.images else None
    return Batch(
        t["in.latents"], t["in.action"], t["in.proprio"][:, 0], t["in.context"], t["in.context_mask"], padded, pad
    )


def draws_of(model: Policy, t: Tensors) -> Draws:
    time = model.flow.timestep
    both = t["in.noise_video"], time(t["in.u_video"]), t["in.noise_action"], time(t["in.u_action"])
    u = t.get("I.in.u_cond", torch.zeros(len(both[0])))  # not drawn where no copy is noisy
    watched = torch.where(t["I.in.cond_noised"], time(u), 0.0)
    return Draws(*both, watched, t.get("I.in.noise_cond", torch.zeros_like(both[0])))


def merged(pair: KeysValues) -> dict[str, Tensor]:
    """Keys and values with their heads side by side."""
    return {name: rearrange(x, "b h s d -> b s (h d)") for name, x in zip("kv", pair, strict=True)}


def test_every_output_is_looked_at(golden: Tensors) -> None:
    assert [k for k in golden if not any(re.fullmatch(pattern, k) for pattern in CHECKED)] == []
    cases = {found["case"] for k in golden if (found := re.fullmatch(CHECKED[2], k))}
    assert cases == set(CASES)


# -- training -------------------------------------------------------------------------------------------------------


def test_what_is_noised(policy: Callable[[str], Policy], golden: Tensors) -> None:
    model = policy("idm")
    batch, draws, steps = batch_of(golden), draws_of(model, golden), model.flow.train_steps
    for ours, theirs in (
        (draws.timestep, "in.timestep_video"),
        (draws.action_timestep, "in.timestep_action"),
        (draws.watched_timestep, "I.in.timestep_cond"),
    ):
        torch.testing.assert_close(ours, golden[theirs], atol=1e-4, rtol=1e-6)
    first = batch.latents[:, :, :1]
    for noise, t, theirs in (
        (draws.noise, draws.timestep, "mid.noisy_video"),
        (draws.watched_noise, draws.watched_timestep, "I.mid.latents_cond"),
    ):
        x = noised(batch.latents, noise, t / steps)
        torch.testing.assert_close(torch.cat([first, x[:, :, 1:]], dim=2), golden[theirs], **CLOSE)
    x = noised(batch.action, draws.action_noise, draws.action_timestep / steps)
    torch.testing.assert_close(x, golden["mid.noisy_action"], **CLOSE)
    for t, theirs in ((draws.timestep, "mid.weight_video"), (draws.action_timestep, "mid.weight_action")):
        torch.testing.assert_close(model.flow.weight(t), golden[theirs].reshape(-1), **CLOSE)


@torch.no_grad()
def test_velocities(policy: Callable[[str], Policy], golden: Tensors, policy_prediction: str) -> None:
    """The first frame's, which no loss looks at, from the video expert as it is given all frames."""
    model, video = policy(VARIANTS[policy_prediction]), golden[f"{policy_prediction}.mid.pred_video"]
    batch, draws = batch_of(golden), draws_of(model, golden)
    found = predicted(model, batch, draws)
    torch.testing.assert_close(found.video, video[:, :, 1:], **CLOSE)
    torch.testing.assert_close(found.action, golden[f"{policy_prediction}.mid.pred_action"], **CLOSE)
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    whole = model.velocity(golden["mid.noisy_video"], draws.timestep, None, context, mask)
    torch.testing.assert_close(whole, video, **CLOSE)


def test_losses(policy: Callable[[str], Policy], golden: Tensors, policy_case: str) -> None:
    model, case = policy(VARIANTS[policy_case[0]]), CASES[policy_case]
    batch, draws, weights = batch_of(golden, case), draws_of(model, golden), case.objective
    with torch.no_grad():
        terms = {name: float(term) for name, term in policy_loss(model, batch, draws, weights).items()}
        found = predicted(model, batch, draws)
    assert ("video" in terms) == (weights.video_weight > 0)
    ours = {"loss_action": weights.action_weight * terms["action"], "total": terms["total"]}
    ours["loss_video"] = weights.video_weight * terms.get("video", 0.0)
    out = {k.split(".", 2)[2]: float(v) for k, v in golden.items() if k.startswith(f"{policy_case}.out.")}
    assert "loss_action" in out
    assert {name: ours[name] for name in out} == pytest.approx(out, rel=1e-4, abs=2e-5)
    if case.actions == "all":
        assert terms["action"] == 0
    assert found.video is not None
    per_sample = {
        "video": video_error(found.video, batch.latents, draws.noise, batch.padded),
        "action": action_error(found.action, batch.action, draws.action_noise, batch.action_padded),
    }
    for name, error in per_sample.items():
        if (theirs := golden.get(f"{policy_case}.mid.{name}_per_sample")) is not None:
            torch.testing.assert_close(error, theirs, **CLOSE)


def test_gradients(
    policy: Callable[[str], Policy], golden: Tensors, read: Callable[[str], Any], policy_gradient: str
) -> None:
    model, case = policy(VARIANTS[policy_gradient[0]]), CASES[policy_gradient]
    if case.frozen:
        train(model, False, case.objective)
    terms = policy_loss(model, batch_of(golden, case), draws_of(model, golden), case.objective)
    terms["total"].backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    prefix = f"{policy_gradient}.gradnorm."
    norms = {k.removeprefix(prefix): float(v) for k, v in golden.items() if k.startswith(prefix)}
    total = norms.pop("__total__")
    assert norms
    for name, norm in norms.items():
        assert float(found[our_name(name)].double().norm()) == pytest.approx(norm, rel=1e-3, abs=1e-7), name
    squares = sum(float(g.double().square().sum()) for g in found.values())
    assert math.sqrt(squares) == pytest.approx(total, rel=1e-3)
    prefix = f"{policy_gradient}.grad."
    for name, gradient in ((k.removeprefix(prefix), v) for k, v in golden.items() if k.startswith(prefix)):
        assert float((found[our_name(name)] - gradient).norm()) <= 1e-3 * float(gradient.norm()), name
    meta = read("policy")[1]
    silent = {our_name(k) for kind in ("no_grad", "zero_grad") for k in meta[kind].get(policy_gradient, [])}
    assert {name for name, gradient in found.items() if not gradient.any()} == silent
    if case.frozen:
        assert silent == {name for name, p in model.named_parameters() if not p.requires_grad}


def test_what_the_action_loss_alone_does_not_reach_is_frozen(
    policy: Callable[[str], Policy], read: Callable[[str], Any]
) -> None:
    model = policy("first-frame")
    train(model, True, ACTION_ALONE)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {our_name(k) for k in read("policy")[1]["zero_grad"]["UA"]}


@torch.no_grad()
def test_cached_first_frame_of_a_frozen_video_expert(policy: Callable[[str], Policy], golden: Tensors) -> None:
    model, batch = policy("first-frame"), batch_of(golden)
    seen = remember(model, Observation(batch.latents[:, :, :1], batch.text, batch.text_mask, batch.proprio)).seen
    for name, value in merged(seen[0]).items():
        torch.testing.assert_close(value, golden[f"UD.mid.kv.block0.{name}"], **CLOSE)


# -- sampling -------------------------------------------------------------------------------------------------------


def recalled(model: Policy, t: Tensors, proprio: bool = True) -> Memory:
    given = {name: t[f"infer.in.{name}"] for name in ("first_frame", "context", "context_mask", "proprio")}
    return remember(model, Observation(*list(given.values())[:3], given["proprio"] if proprio else None))


def noise_of(t: Tensors, video: bool) -> Noise:
    return Noise(t["infer.in.noise_action"], t["infer.in.noise_video"] if video else None)


def test_sampled_actions(policy: Callable[[str], Policy], golden: Tensors, acted: str) -> None:
    model, (steps, shift) = policy("first-frame"), (int(acted.split(".")[1][1:]), re.search(r"\.shift(\d+)", acted))
    config = SamplerConfig(steps, shift=float(shift[1]) if shift else None)
    found = sample(model, recalled(model, golden, "no_proprio" not in acted), noise_of(golden, False), config)
    assert found.video is None
    torch.testing.assert_close(found.action[0], golden[f"infer.{acted}.action"], **SAMPLED)


def watched_steps(model: Policy, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, list[KeysValues]]]:
    """Will hold the state before each step, the velocity, and what was seen of the video."""
    steps: list[tuple[Tensor, Tensor, list[KeysValues]]] = []
    original = model.denoise_actions

    def spy(x: Tensor, t: Tensor, about: Any, seen: list[KeysValues]) -> Tensor:
        velocity = original(x, t, about, seen)
        steps.append((x, velocity, seen))
        return velocity

    monkeypatch.setattr(model, "denoise_actions", spy)
    return steps


def counted(golden: Tensors, rollout: str) -> int:
    """Steps of the rollout of this name."""
    found = {m[1] for k in golden if (m := re.match(rf"infer\.{rollout}\.n(\d+)\.step0\.", k))}
    assert len(found) == 1
    return int(found.pop())


def test_steps_of_a_first_frame_policy(
    policy: Callable[[str], Policy], golden: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, n = policy("first-frame"), counted(golden, "uncond")
    memory, steps = recalled(model, golden), watched_steps(model, monkeypatch)
    last = sample(model, memory, noise_of(golden, False), SamplerConfig(n)).action
    states = [x for x, *_ in steps[1:]] + [last]
    for i, ((_, velocity, _), x) in enumerate(zip(steps, states, strict=True)):
        torch.testing.assert_close(velocity, golden[f"infer.uncond.n{n}.step{i}.v"], **SAMPLED)
        torch.testing.assert_close(x, golden[f"infer.uncond.n{n}.step{i}.x"], **SAMPLED)
    blocks = {int(m[1]) for k in golden if (m := re.fullmatch(r"infer\.uncond\.kv\.block(\d+)\.k", k))}
    assert blocks == {0, model.config.video.num_layers - 1}
    for block in blocks:
        for name, value in merged(memory.seen[block]).items():
            torch.testing.assert_close(value, golden[f"infer.uncond.kv.block{block}.{name}"], **CLOSE)


def test_imagined_video_and_its_actions(
    policy: Callable[[str], Policy], golden: Tensors, imagined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, n = imagined.split(".")[0], int(imagined.split(".")[1][1:])
    model = policy(ROLLOUTS[name])
    memory, steps = recalled(model, golden), watched_steps(model, monkeypatch)
    found = sample(model, memory, noise_of(golden, True), SamplerConfig(n))
    assert found.video is not None
    torch.testing.assert_close(found.video, golden[f"infer.{imagined}.video"], **SAMPLED)
    own = f"infer.{imagined}.action" if name != "uncond_joint" else f"infer.uncond.n{n}.action"
    torch.testing.assert_close(found.action[0], golden[own], **SAMPLED)
    assert len(steps) == n
    for i, (_, velocity, seen) in enumerate(steps):
        if name == "joint":
            torch.testing.assert_close(velocity, golden[f"infer.joint.n{n}.step{i}.action_v"], **SAMPLED)
        if name == "idm":
            for part, value in merged(seen[0]).items():
                torch.testing.assert_close(value, golden[f"infer.idm.n{n}.kv.block0.{part}"], **SAMPLED)


# -- who sees whom --------------------------------------------------------------------------------------------------


def disturbed(x: Tensor, tokens: list[int | None], patch: tuple[int, ...]) -> Tensor:
    """A copy of latents [1, C, F, H, W] for each token (None: as they are), which is changed in it."""
    grid = [n // p for n, p in zip(x.shape[2:], patch, strict=True)]
    y = x.repeat(len(tokens), 1, 1, 1, 1)
    for row, token in enumerate(tokens):
        if token is not None:
            f, h, w = (int(i) for i in np.unravel_index(token, grid))
            y[row, :, f, h * patch[1] : (h + 1) * patch[1], w * patch[2] : (w + 1) * patch[2]] += 4.0
    return y


@torch.no_grad()
def test_masks(policy: Callable[[str], Policy], golden: Tensors, policy_mask: str) -> None:
    """A token is changed; what else changes is what may see it. (The masks are transitive: depth changes nothing.)"""
    mask, name = golden[f"mask.{policy_mask}"], policy_mask
    model = policy({"uncond": "first-frame", "idm": "idm", "joint": "joint"}[name.split("_")[0]])
    patch, clean, action = model.config.patch, golden["in.latents"][:1], golden["in.action"][:1]
    frame = math.prod(clean.shape[3:]) // math.prod(patch)
    count = frame if name == "uncond_first_frame_only" else frame * clean.shape[2]
    copies = 2 if name == "idm_train" else 1
    # One sample undisturbed, then one for each key. Both copies of the video have the same first frame.
    video: list[int | None] = [None, *range(copies * count), *[None] * action.shape[1]]
    noisy = [t if t is None or t < count else t - count if t - count < frame else None for t in video]
    copied = [t if t is None or t < frame or copies == 1 else t - count if t >= count else None for t in video]
    x, watched = disturbed(clean, noisy, patch), disturbed(clean, copied, patch)
    actions = action.repeat(len(mask) + 1, 1, 1)
    for step in range(action.shape[1]):
        actions[1 + copies * count + step, step] += 4.0
    rows = outputs(model, golden, x, watched, actions, name)
    rows = [rows[0][:, :count], *rows[1:]]
    change = torch.cat([(r - r[:1]).abs().amax(dim=2)[1:] for r in rows], dim=1).T
    expected = mask.clone()
    for i in range(frame if copies == 2 else 0):
        expected[:, [i, count + i]] = (mask[:, i] | mask[:, count + i])[:, None]
    assert torch.equal(change > 1e-4, expected)
    assert bool((change[~expected] < 1e-5).all())


def outputs(model: Policy, t: Tensors, x: Tensor, watched: Tensor, action: Tensor, name: str) -> list[Tensor]:
    """Rows [N, queries, numbers]: of video tokens, of those of the watched copy where there is one, of actions."""
    n, time = len(x), torch.full((1,), 500.0)
    text, proprio = t["in.context"][:1].repeat(n, 1, 1), t["in.proprio"][:1, 0].repeat(n, 1)
    context, _ = model.context(text, torch.ones(text.shape[:2], dtype=torch.bool), proprio)
    about = model.condition(None, context, None, x.shape[2:])
    known = model.remember_first(x[:, :, :1], about)
    assert known.before is not None
    velocity = model.denoise(x, time, about)
    _, p, q = model.config.patch
    rows = [rearrange(velocity, "n c f (h p) (w q) -> n (f h w) (c p q)", p=p, q=q)]
    seen = known.before
    if model.config.variant != "first-frame":
        _, seen = model.watch(watched[:, :, 1:], time, known, predict=False)
    if name == "idm_train":  # what a token of the copy saw is in its keys of the last block
        rows.append(rearrange(seen[-1][0], "n h s d -> n s (h d)"))
    return [*rows, model.denoise_actions(action, time, model.action_condition(context, about), seen)]


# -- LIBERO's numbers -----------------------------------------------------------------------------------------------


def test_orientation(golden: Tensors) -> None:
    found = axis_angle(golden["libero.quat_xyzw"].numpy())
    np.testing.assert_allclose(found, golden["libero.axisangle"].numpy(), atol=2e-5, rtol=1e-4)


def test_actions_for_the_environment(golden: Tensors) -> None:
    stats = Normalizer(golden["libero.action_min"].numpy(), golden["libero.action_max"].numpy())
    normalised = golden["libero.action_normalised"].numpy()
    stored = stats.denormalize(normalised)
    close: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
    np.testing.assert_allclose(stored, golden["libero.action_denormalised"].numpy(), **close)
    free = from_recording(stored, binarise=False)
    np.testing.assert_allclose(free, golden["libero.action_env_not_binarised"].numpy(), **close)
    bound = from_recording(stored)
    np.testing.assert_allclose(bound, golden["libero.action_env"].numpy(), **close)
    np.testing.assert_array_equal(bound[..., GRIPPER], golden["libero.action_env"][..., GRIPPER].numpy())
    np.testing.assert_allclose(stats.normalize(stored), golden["libero.action_renormalised"].numpy(), **close)
    np.testing.assert_allclose(stats.normalize(stored), normalised, **close)
