"""The network: what it sees and what not, cached and uncached, alone and in a batch; what it refuses; its files."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simforcing.errors import InputError, SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_model, load_strictly

SAME: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def tiny(seed: int = 0, **changes: Any) -> WorldModel:
    """30,000 parameters; its simulation projections are not zero, so that the condition matters."""
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
    config = WorldModelConfig(ExpertConfig(24, 48, **sizes), ExpertConfig(16, 32, **sizes), channels=3)
    torch.manual_seed(seed)
    model = WorldModel(replace(config, **changes)).eval()
    if model.sim is not None:
        with torch.no_grad():
            for parameter in model.sim.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model


def arguments(batch: int = 2, frames: int = 4, a_transition: int = 4, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "latents": torch.randn(batch, 3, frames, 4, 4, generator=g),
        "timestep": 1000 * torch.rand(batch, generator=g),
        "action": torch.randn(batch, a_transition * (frames - 1), 7, generator=g),
        "context": torch.randn(batch, 3, 8, generator=g),
        "context_mask": torch.ones(batch, 3, dtype=torch.bool),
    }


def simulated(a: dict[str, Tensor], gate: list[float] | None = None) -> dict[str, Tensor]:
    sim = torch.randn(a["latents"].shape, generator=torch.Generator().manual_seed(2))
    return a | {"sim_latents": sim} | ({} if gate is None else {"sim_gate": torch.tensor(gate)})


# -- what is seen ---------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("gate", [None, [1.0, 0.0], [0.0, 0.0], [0.25, 0.0]])
@pytest.mark.parametrize("masked", [False, True])
def test_batch_equals_loop(gate: list[float] | None, masked: bool) -> None:
    model, a = tiny(), simulated(arguments(), gate)
    if masked:
        a["context_mask"] = torch.tensor([[True, True, False], [True, True, True]])
    together = model.velocity(**a)
    for i in range(len(together)):
        alone = model.velocity(**{k: v[i : i + 1] for k, v in a.items()})
        torch.testing.assert_close(alone[0], together[i], **SAME)


@torch.no_grad()
def test_gate_zero_is_no_simulation_and_no_gate_is_one() -> None:
    model, a = tiny(), arguments()
    plain, seeing = model.velocity(**a), model.velocity(**simulated(a))
    assert torch.equal(model.velocity(**simulated(a, [0.0, 0.0])), plain)
    assert torch.equal(model.velocity(**simulated(a, [1.0, 1.0])), seeing)
    assert float((seeing - plain).abs().max()) > 0.05
    half = model.velocity(**simulated(a, [0.0, 1.0]))
    torch.testing.assert_close(half, torch.cat([plain[:1], seeing[1:]]), **SAME)


def test_a_grown_model_is_unconditioned_and_its_projections_start_to_learn() -> None:
    model, a = tiny(sim_condition=False).with_sim_condition(), arguments()
    assert torch.equal(model.velocity(**simulated(a)), model.velocity(**a))
    model.velocity(**simulated(a)).square().mean().backward()
    assert model.sim is not None
    assert all(conv.weight.grad is not None and conv.weight.grad.abs().sum() > 0 for conv in model.sim.blocks)


def test_simulation_gets_no_gradient() -> None:
    model, a = tiny(), simulated(arguments())
    a["sim_latents"].requires_grad_()
    model.velocity(**a).square().mean().backward()
    assert a["sim_latents"].grad is None


def test_only_unused_parameters_get_no_gradient() -> None:
    model, a = tiny(), arguments()
    a["context"], a["context_mask"] = model.context(a["context"], a["context_mask"], torch.randn(2, 7))
    model.velocity(**simulated(a)).square().mean().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {name for name, _ in model.unused_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("positions", ["index", "frame"])
@pytest.mark.parametrize("attention", ["first_frame_causal", "bidirectional"])
def test_later_frames_reach_the_first_one_only_in_a_bidirectional_model_and_actions_always(
    positions: str, attention: str
) -> None:
    model, a = tiny(action_positions=positions, attention=attention), arguments()
    base = model.velocity(**a)[:, :, 0]
    changed = a["latents"].clone()
    changed[:, :, 1:] += 1
    later = model.velocity(**a | {"latents": changed, "timestep": a["timestep"] / 2})[:, :, 0]
    assert torch.equal(later, base) == (attention == "first_frame_causal")
    assert not torch.allclose(model.velocity(**a | {"action": a["action"] + 1})[:, :, 0], base)


@torch.no_grad()
def test_no_action_is_not_zero_action() -> None:
    model, a = tiny(), arguments()
    without, zero = model.velocity(**a | {"action": None}), model.velocity(**a | {"action": 0 * a["action"]})
    assert float((without - zero).abs().max()) > 0.01


@torch.no_grad()
def test_hidden_text_is_not_seen_and_a_mask_that_hides_nothing_is_none() -> None:
    model, a = tiny(), arguments()
    mask = torch.tensor([[True, True, False], [True, False, True]])
    hidden = model.velocity(**a | {"context_mask": mask})
    other = torch.where(mask[..., None], a["context"], a["context"] + 5)
    assert torch.equal(model.velocity(**a | {"context_mask": mask, "context": other}), hidden)
    shorter = a | {"context": a["context"][:1, :2], "context_mask": None}
    alone = model.velocity(**{k: v if v is None else v[:1] for k, v in shorter.items()})
    torch.testing.assert_close(alone[0], hidden[0], **SAME)
    assert torch.equal(model.velocity(**a | {"context_mask": None}), model.velocity(**a))
    assert not torch.allclose(model.velocity(**a), hidden)


@torch.no_grad()
def test_time_is_float32_whatever_the_weights_are() -> None:
    """In bfloat16 these two times would be one."""
    model, a = tiny().bfloat16(), arguments(1)
    near = [torch.tensor([t]) for t in (999.0, 1001.0)]
    assert near[0].bfloat16() == near[1].bfloat16()
    one, other = (model.velocity(**a | {"timestep": t}) for t in near)
    assert one.dtype == torch.float32
    assert not torch.equal(one, other)


# -- conditions -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    frames=st.integers(2, 5),
    a_transition=st.sampled_from([0, 1, 4]),
    gate=st.sampled_from([None, [1.0, 1.0], [0.0, 1.0], [0.5, 0.0]]),
    positions=st.sampled_from(["index", "frame"]),
    masked=st.booleans(),
)
@torch.no_grad()
def test_steps_that_remember_the_first_frame_equal_the_one_call_forward(
    frames: int, a_transition: int, gate: list[float] | None, positions: str, masked: bool
) -> None:
    model, a = tiny(action_positions=positions), arguments(2, frames, max(a_transition, 1))
    action = a["action"] if a_transition else None
    mask = torch.tensor([[True, False, True], [True, True, True]]) if masked else a["context_mask"]
    sim = {k: v for k, v in simulated(a, gate).items() if k.startswith("sim")} if gate else {}
    whole = model.velocity(a["latents"], a["timestep"], action, a["context"], mask, **sim)
    condition = model.condition(action, a["context"], mask, a["latents"].shape[2:], **sim)
    ready = model.remember_first(a["latents"][:, :, :1], condition)
    later = model.denoise(a["latents"][:, :, 1:], a["timestep"], ready)
    torch.testing.assert_close(later, whole[:, :, 1:], **SAME)


@torch.no_grad()
def test_the_first_frame_of_a_bidirectional_model_cannot_be_remembered() -> None:
    model, a = tiny(attention="bidirectional"), arguments()
    condition = model.condition(a["action"], a["context"], None, a["latents"].shape[2:])
    with pytest.raises(SimForcingError, match="bidirectional"):
        model.remember_first(a["latents"][:, :, :1], condition)


@torch.no_grad()
@pytest.mark.parametrize("clean", [True, False])
def test_one_time_serves_all_samples(clean: bool) -> None:
    model, a = tiny(), arguments()
    condition = model.condition(a["action"], a["context"], None, a["latents"].shape[2:])
    shared = model.denoise(a["latents"], torch.tensor([400.0]), condition, clean)
    torch.testing.assert_close(shared, model.denoise(a["latents"], torch.full((2,), 400.0), condition, clean), **SAME)


@torch.no_grad()
def test_a_first_frame_may_be_clean_in_some_samples() -> None:
    model, a = tiny(), arguments()
    condition = model.condition(a["action"], a["context"], None, a["latents"].shape[2:])
    clean, noisy = (model.denoise(a["latents"], a["timestep"], condition, c) for c in (True, False))
    assert not torch.allclose(clean, noisy)
    some = model.denoise(a["latents"], a["timestep"], condition, torch.tensor([True, False]))
    torch.testing.assert_close(some, torch.cat([clean[:1], noisy[1:]]), **SAME)


@torch.no_grad()
def test_a_condition_can_be_taken_apart() -> None:
    model, a = tiny(), arguments()
    mask = torch.tensor([[True, False, True], [True, True, True]])
    condition = model.condition(a["action"], a["context"], mask, a["latents"].shape[2:])
    rows = torch.tensor([1, 0, 1])
    found = model.denoise(a["latents"][rows], a["timestep"][rows], condition.take(rows))
    whole = model.denoise(a["latents"], a["timestep"], condition)
    torch.testing.assert_close(found, whole[rows], **SAME)


# -- refused --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Any]], str]] = {
    "latents without a batch": (
        lambda a: {"latents": a["latents"][0]},
        r"latents have shape \[3, 4, 4, 4\].*\[B, 3, F",
    ),
    "channels": (
        lambda a: {"latents": a["latents"][:, :2]},
        r"latents have shape \[2, 2, 4, 4, 4\].*\[B, 3, F, H, W\]",
    ),
    "odd width": (lambda a: {"latents": a["latents"][..., :3]}, r"latents have F, H, W = \[4, 4, 3\].*\[1, 2, 2\]"),
    "timestep": (lambda a: {"timestep": a["timestep"][:1]}, r"timestep has shape \[1\], it must be \[2\]"),
    "text width": (lambda a: {"context": a["context"][..., :7]}, r"context has shape \[2, 3, 7\].*\[2, L, 8\]"),
    "text batch": (lambda a: {"context": a["context"][:1]}, r"context has shape \[1, 3, 8\].*\[2, L, 8\]"),
    "mask": (lambda a: {"context_mask": a["context_mask"][:, :2]}, r"context_mask has shape \[2, 2\].*\[2, 3\]"),
    "blind mask": (
        lambda a: {"context_mask": torch.tensor([[True, True, True], [False, False, False]])},
        r"context_mask.*\[2, 3\].*hides every token of sample 1.*at least one True",
    ),
    "action width": (lambda a: {"action": a["action"][..., :6]}, r"action has shape \[2, 12, 6\].*\[2, A, 7\]"),
    "action batch": (lambda a: {"action": a["action"][:1]}, r"action has shape \[1, 12, 7\].*\[2, A, 7\]"),
    "action steps": (lambda a: {"action": a["action"][:, :11]}, r"action has shape \[2, 11, 7\].*multiple of the 3"),
    "no action steps": (lambda a: {"action": a["action"][:, :0]}, r"action has shape \[2, 0, 7\].*multiple of the 3"),
    "NaN": (lambda a: {"action": a["action"] * math.nan}, r"action of shape \[2, 12, 7\] holds NaN.*finite"),
    "simulation": (
        lambda a: {"sim_latents": a["latents"][:, :, :3]},
        r"sim_latents has shape \[2, 3, 3, 4, 4\].*\[2, 3, 4, 4, 4\]",
    ),
    "gate": (
        lambda a: {"sim_latents": a["latents"], "sim_gate": torch.ones(3)},
        r"sim_gate has shape \[3\], it must be \[2\]",
    ),
    "gate alone": (lambda a: {"sim_gate": torch.ones(2)}, r"sim_gate.*sim_latents"),
}


@pytest.mark.parametrize("what", BAD)
def test_velocity_refuses(what: str) -> None:
    a, (change, message) = arguments(), BAD[what]
    with pytest.raises(ValueError, match=message) as found:
        tiny().velocity(**a | change(a))
    assert isinstance(found.value, InputError)


@pytest.mark.parametrize("head_dim", [7, 4, 0])
def test_heads_that_cannot_be_split_over_three_axes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim = {head_dim}.*even 6 or more"):
        ExpertConfig(24, 48, 2, 2, head_dim, 8)


@pytest.mark.parametrize("changes", [{"num_heads": 3}, {"num_layers": 1}, {"num_heads": 1, "head_dim": 24}])
def test_experts_must_share_their_heads(changes: dict[str, int]) -> None:
    config = tiny().config
    with pytest.raises(ValueError, match=r"attend jointly.*\[2, 2, 12\] in video and .* in action"):
        WorldModel(replace(config, action=replace(config.action, **changes)))


# -- files ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_round_trip_through_a_directory(tmp_path: Path) -> None:
    model, a = tiny(action_positions="frame", attention="bidirectional"), arguments()
    model.save_pretrained(tmp_path / "m")
    loaded = WorldModel.from_pretrained(tmp_path / "m")
    assert loaded.config == model.config
    assert torch.equal(loaded.velocity(**simulated(a)), model.velocity(**simulated(a)))
    with pytest.raises(SimForcingError, match="not empty"):
        model.save_pretrained(tmp_path / "m")


def test_a_wrong_file_is_refused_with_the_names(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "m")
    state = model.state_dict()
    state["extra"] = state.pop("proprio.bias")
    state["video.proj_out.bias"] = torch.zeros(3)
    with pytest.raises(
        SimForcingError, match=r"missing: proprio.bias; unexpected: extra; wrong shape: video.proj_out.bias"
    ):
        load_strictly(tiny(), state, "x")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SimForcingError, match="damaged"):
        load_model(tmp_path / "m", WorldModel)
    with pytest.raises(SimForcingError, match=r"config.json is missing"):
        load_model(tmp_path, WorldModel)
    with pytest.raises(SimForcingError, match="unknown keys widht"):
        WorldModelConfig.from_dict({"widht": 3})
