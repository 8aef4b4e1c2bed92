"""The joint forward against the reference vectors, and its properties."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.model.released import our_state
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly, load_world_model

TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, json.loads(file.metadata()["config"])


def expert(config: dict[str, Any]) -> ExpertConfig:
    return ExpertConfig(
        dim=config["hidden_dim"],
        ffn_dim=config["ffn_dim"],
        num_layers=config["num_layers"],
        num_heads=config["num_heads"],
        head_dim=config["attn_head_dim"],
        text_dim=config["text_dim"],
        freq_dim=config["freq_dim"],
        eps=config["eps"],
    )


@pytest.fixture(scope="module")
def reference(parity: Path) -> tuple[WorldModel, dict[str, Tensor]]:
    tensors, config = read(parity / "forward.safetensors")
    model = WorldModel(
        WorldModelConfig(
            video=expert(config["video"]), action=expert(config["action"]), channels=config["video"]["in_dim"]
        )
    )
    load_strictly(
        model,
        our_state({k: v for k, v in tensors.items() if k.startswith(("mot.", "proprio_encoder."))}),
        "reference",
    )
    return model.eval(), tensors


def inputs(model: WorldModel, t: dict[str, Tensor]) -> dict[str, Any]:
    context, mask = model.context(t["in.context"], t["in.context_mask"].bool(), t["in.proprio"])
    return {
        "latents": t["in.latents"],
        "timestep": t["in.timestep"],
        "action": t["in.action"],
        "context": context,
        "context_mask": mask,
    }


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", ["a_action", "b_no_action", "c_gate", "d_gate", "e_no_gate_arg", "f_zero_action"])
def test_forward_equals_the_reference(reference: tuple[WorldModel, dict[str, Tensor]], case: str, grad: bool) -> None:
    model, t = reference
    arguments = inputs(model, t)
    if case[0] in "cde":
        arguments["sim_latents"] = t["in.sim_latents"]
    if case[0] in "cd":
        arguments["sim_gate"] = t[f"in.{case}"]
    if case == "b_no_action":
        arguments["action"] = None
    if case == "f_zero_action":
        arguments["action"] = torch.zeros_like(t["in.action"])
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model.velocity(**arguments), t[f"out.{case}"], **TOLERANCE)


def test_forward_with_a_noisy_first_frame_equals_the_reference(
    reference: tuple[WorldModel, dict[str, Tensor]],
) -> None:
    model, t = reference
    a = inputs(model, t)
    condition = model.condition(a["action"], a["context"], a["context_mask"], a["latents"].shape[2])
    v = model.denoise(a["latents"], a["timestep"], condition, first_frame_clean=False)
    torch.testing.assert_close(v, t["out.g_first_frame_not_clean"], **TOLERANCE)


@torch.no_grad()
def test_batch_equals_loop(reference: tuple[WorldModel, dict[str, Tensor]]) -> None:
    model, t = reference
    arguments = inputs(model, t) | {"sim_latents": t["in.sim_latents"], "sim_gate": t["in.c_gate"]}
    together = model.velocity(**arguments)
    for i in range(len(together)):
        alone = model.velocity(**{k: v[i : i + 1] for k, v in arguments.items()})
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_gate_zero_equals_no_simulation(reference: tuple[WorldModel, dict[str, Tensor]]) -> None:
    model, t = reference
    a = inputs(model, t)
    gated = model.velocity(**a, sim_latents=t["in.sim_latents"], sim_gate=torch.zeros(len(t["in.timestep"])))
    torch.testing.assert_close(gated, model.velocity(**a), atol=0, rtol=0)


def tiny(**changes: Any) -> WorldModel:
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
    config = WorldModelConfig(ExpertConfig(24, 48, **sizes), ExpertConfig(16, 32, **sizes), channels=3, **changes)
    torch.manual_seed(0)
    return WorldModel(config)


def arguments(batch: int = 2) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(batch, 3, 4, 4, 4, generator=g),
        "timestep": torch.tensor([300.0, 900.0][:batch]),
        "action": torch.randn(batch, 12, 7, generator=g),
        "context": torch.randn(batch, 3, 8, generator=g),
        "context_mask": torch.ones(batch, 3, dtype=torch.bool),
    }


def test_a_new_model_is_unconditioned_and_sim_starts_to_learn() -> None:
    model, a = tiny(), arguments()
    plain = model.velocity(**a)
    conditioned = model.velocity(**a, sim_latents=torch.randn_like(a["latents"]))
    torch.testing.assert_close(conditioned, plain, atol=0, rtol=0)
    conditioned.square().mean().backward()
    assert model.sim is not None
    assert all(conv.weight.grad is not None and conv.weight.grad.abs().sum() > 0 for conv in model.sim.blocks)


def test_only_unused_parameters_get_no_gradient() -> None:
    model, a = tiny(), arguments()
    a["context"], a["context_mask"] = model.context(a["context"], a["context_mask"], torch.randn(2, 7))
    model.velocity(**a, sim_latents=torch.randn_like(a["latents"])).square().mean().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {name for name, _ in model.unused_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("positions", ["index", "frame"])
def test_later_frames_and_noise_do_not_reach_the_first_frame_but_actions_do(positions: str) -> None:
    model, a = tiny(action_positions=positions), arguments()
    base = model.velocity(**a)
    changed = a["latents"].clone()
    changed[:, :, 1:] += 1
    assert torch.equal(
        model.velocity(**a | {"latents": changed, "timestep": a["timestep"] / 2})[:, :, 0], base[:, :, 0]
    )
    assert not torch.allclose(model.velocity(**a | {"action": a["action"] + 1})[:, :, 0], base[:, :, 0])


@torch.no_grad()
def test_round_trip_through_a_directory(tmp_path: Path) -> None:
    model, a = tiny(action_positions="frame"), arguments()
    model.save_pretrained(tmp_path / "m")
    loaded = WorldModel.from_pretrained(tmp_path / "m")
    assert loaded.config == model.config
    torch.testing.assert_close(loaded.velocity(**a), model.velocity(**a), atol=0, rtol=0)
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
        load_world_model(tmp_path / "m")
    with pytest.raises(SimForcingError, match=r"config.json is missing"):
        load_world_model(tmp_path)
    with pytest.raises(SimForcingError, match="unknown keys widht"):
        WorldModelConfig.from_dict({"widht": 3})


def test_experts_must_share_their_heads() -> None:
    config = tiny().config
    with pytest.raises(SimForcingError, match="attend jointly"):
        WorldModel(replace(config, action=replace(config.action, num_heads=3)))
