"""The sampler against the reference rollouts, and what each kind of guidance is and costs."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.model.flow import Flow
from simforcing.model.released import our_state
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly
from simforcing.predict.sampler import Guidance, Inputs, sample, start_noise, two_stages

ROLLOUT = {"atol": 1e-4, "rtol": 1e-4}


# -- reference ------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, json.loads(file.metadata()["config"])


def expert(config: dict[str, Any]) -> ExpertConfig:
    return ExpertConfig(
        dim=config["hidden_dim"], ffn_dim=config["ffn_dim"], num_layers=config["num_layers"],
        num_heads=config["num_heads"], head_dim=config["attn_head_dim"], text_dim=config["text_dim"],
        freq_dim=config["freq_dim"], eps=config["eps"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def rollouts(parity: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return read(parity / "sample.safetensors")


@pytest.fixture(scope="module")
def reference(parity: Path) -> WorldModel:
    tensors, config = read(parity / "forward.safetensors")
    video, action = expert(config["video"]), expert(config["action"])
    model = WorldModel(WorldModelConfig(video, action, channels=config["video"]["in_dim"]))
    weights = {k: v for k, v in tensors.items() if k.startswith(("mot.", "proprio_encoder."))}
    load_strictly(model, our_state(weights), "reference")
    return model.eval()


def reference_inputs(t: dict[str, Tensor], stage: str) -> Inputs:
    return Inputs(t["in.action"], t["in.proprio"], t[f"in.context_{stage}"], t[f"in.context_mask_{stage}"].bool())


def test_simulation_equals_the_reference(
    reference: WorldModel, rollouts: tuple[dict[str, Tensor], dict[str, Any]]
) -> None:
    t, config = rollouts
    sim = sample(reference, t["in.first_sim"], reference_inputs(t, "sim"), t["in.noise_sim"], config["size"]["Ns"])
    torch.testing.assert_close(sim, t["out.sim_latents"], **ROLLOUT)


def test_real_equals_the_reference_at_every_guidance(
    reference: WorldModel, rollouts: tuple[dict[str, Tensor], dict[str, Any]]
) -> None:
    t, config = rollouts
    inputs, steps = reference_inputs(t, "real"), config["size"]["Nr"]
    assert {0.0, 1.0} < set(config["size"]["w"])
    for w in config["size"]["w"]:
        real = sample(
            reference, t["in.first_real"], inputs, t["in.noise_real"], steps, t["out.sim_latents"], Guidance(w)
        )
        torch.testing.assert_close(real, t[f"out.real.w{w:g}"], msg=f"w = {w}", **ROLLOUT)


def test_another_shift_equals_the_reference(
    reference: WorldModel, rollouts: tuple[dict[str, Tensor], dict[str, Any]]
) -> None:
    t, config = rollouts
    shifted = WorldModel(replace(reference.config, flow=Flow(shift=3.0))).eval()
    shifted.load_state_dict(reference.state_dict())
    names = [n for n in t if re.fullmatch(r"out\.real\.w[\d.]+\.shift3", n)]
    assert names
    for name in names:
        w = float(name.removeprefix("out.real.w").removesuffix(".shift3"))
        inputs, steps = reference_inputs(t, "real"), config["size"]["Nr"]
        real = sample(shifted, t["in.first_real"], inputs, t["in.noise_real"], steps, t["out.sim_latents"], Guidance(w))
        torch.testing.assert_close(real, t[name], **ROLLOUT)


def test_two_stages_equal_the_reference(
    reference: WorldModel, rollouts: tuple[dict[str, Tensor], dict[str, Any]]
) -> None:
    """The reference's stages start from different noise; each is checked with its own for both."""
    t, config = rollouts
    size = config["size"]
    w = next(w for w in size["w"] if 0 < w < 1)
    rollout = two_stages(
        reference, t["in.first_real"], t["in.first_sim"], reference_inputs(t, "real"), reference_inputs(t, "sim"),
        t["in.noise_sim"], size["Ns"], size["Nr"], Guidance(w),
    )  # fmt: skip
    assert rollout.sim is not None
    torch.testing.assert_close(rollout.sim, t["out.sim_latents"], **ROLLOUT)
    expected = sample(
        reference, t["in.first_real"], reference_inputs(t, "real"), t["in.noise_sim"], size["Nr"], rollout.sim,
        Guidance(w),
    )  # fmt: skip
    assert torch.equal(rollout.real, expected)


# -- properties -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> WorldModel:
    """Small; its simulation projections are not zero, so that the condition matters."""
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
    torch.manual_seed(0)
    found = WorldModel(WorldModelConfig(ExpertConfig(24, 48, **sizes), ExpertConfig(16, 32, **sizes), channels=3))
    assert found.sim is not None
    with torch.no_grad():
        for parameter in found.sim.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return found.eval()


class Case:
    """Random inputs of three clips."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.first, self.first_sim = torch.randn(2, 3, 3, 1, 4, 4, generator=g)
        self.sim = torch.randn(3, 3, 3, 4, 4, generator=g)
        mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
        numbers = [[torch.randn(3, *shape, generator=g) for shape in ((8, 7), (7,), (3, 8))] for _ in range(2)]
        self.inputs, self.sim_inputs = (Inputs(*three, mask) for three in numbers)
        self.noise = start_noise(self.first, 3, [5, 6, 7])

    def row(self, i: int) -> Inputs:
        a = self.inputs
        return Inputs(*(x[i : i + 1] for x in (a.action, a.proprio, a.text, a.text_mask)))


@pytest.fixture
def case() -> Case:
    return Case()


def run(model: WorldModel, case: Case, guidance: Guidance | None = None, steps: int = 3) -> Tensor:
    if guidance is None:
        return sample(model, case.first, case.inputs, case.noise, steps)
    return sample(model, case.first, case.inputs, case.noise, steps, case.sim, guidance)


@torch.no_grad()
def by_hand(model: WorldModel, case: Case, velocity: Callable[..., Tensor], steps: int = 3) -> Tensor:
    """Euler steps written out over the one-call forward."""
    context, mask = model.context(case.inputs.text, case.inputs.text_mask, case.inputs.proprio)
    x = torch.cat([case.first, case.noise[:, :, 1:]], dim=2)
    schedule = model.flow.steps(steps)
    for t, delta in zip(schedule.timesteps, schedule.deltas, strict=True):
        x = x + delta * velocity(x, t.expand(len(x)), case.inputs.action, context, mask)
        x = torch.cat([case.first, x[:, :, 1:]], dim=2)
    return x


def test_no_guidance_is_no_simulation(model: WorldModel, case: Case) -> None:
    plain = run(model, case)
    assert torch.equal(run(model, case, Guidance(0.0)), plain)
    assert torch.equal(run(model, case, Guidance(0.0, "soft")), plain)
    torch.testing.assert_close(plain, by_hand(model, case, model.velocity), atol=1e-5, rtol=1e-5)


def test_full_guidance_is_the_conditioned_model_alone(model: WorldModel, case: Case) -> None:
    full = run(model, case, Guidance(1.0))

    def conditioned(*arguments: Tensor) -> Tensor:
        return model.velocity(*arguments, sim_latents=case.sim)

    torch.testing.assert_close(full, by_hand(model, case, conditioned), atol=1e-5, rtol=1e-5)
    assert torch.equal(run(model, case, Guidance(1.0, "soft")), full)
    assert float((full - run(model, case)).abs().max()) > 0.05


@pytest.mark.parametrize("w", [0.6, 1.5])
def test_guidance_in_between_mixes_two_velocities(model: WorldModel, case: Case, w: float) -> None:
    def mixed(*arguments: Tensor) -> Tensor:
        off, on = model.velocity(*arguments), model.velocity(*arguments, sim_latents=case.sim)
        return off + w * (on - off)

    torch.testing.assert_close(run(model, case, Guidance(w)), by_hand(model, case, mixed), atol=1e-4, rtol=1e-4)


def test_soft_guidance_is_a_gate_of_that_height(model: WorldModel, case: Case) -> None:
    def gated(*arguments: Tensor) -> Tensor:
        return model.velocity(*arguments, sim_latents=case.sim, sim_gate=torch.full((3,), 0.6))

    soft = run(model, case, Guidance(0.6, "soft"))
    torch.testing.assert_close(soft, by_hand(model, case, gated), atol=1e-5, rtol=1e-5)
    assert float((soft - run(model, case, Guidance(0.6))).abs().max()) > 1e-4


@pytest.mark.parametrize("guidance", [Guidance(0.0), Guidance(0.6), Guidance(0.6, "soft"), Guidance(1.0)])
def test_batch_equals_loop(model: WorldModel, case: Case, guidance: Guidance) -> None:
    together = run(model, case, guidance)
    for i in range(3):
        part = slice(i, i + 1)
        noise = start_noise(case.first[part], 3, [5 + i])
        alone = sample(model, case.first[part], case.row(i), noise, 3, case.sim[part], guidance)
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("guidance", [Guidance(0.0), Guidance(0.6), Guidance(1.0)])
def test_the_first_frame_is_the_given_one(model: WorldModel, case: Case, guidance: Guidance) -> None:
    out = run(model, case, guidance)
    assert torch.equal(out[:, :, :1], case.first)
    assert out.dtype == torch.float32
    assert not torch.equal(out[:, :, 1:], case.noise[:, :, 1:])
    before = case.noise.clone()
    run(model, case, guidance)
    assert torch.equal(case.noise, before)


@pytest.mark.parametrize(
    ("guidance", "rows"),
    [(Guidance(0.0), 3), (Guidance(1.0), 3), (Guidance(0.6), 6), (Guidance(0.6, "soft"), 3)],
)
def test_each_step_is_one_call(
    model: WorldModel, case: Case, monkeypatch: pytest.MonkeyPatch, guidance: Guidance, rows: int
) -> None:
    """Guidance doubles the batch, never the number of calls; what no step changes is computed once."""
    counts: dict[str, list[int]] = {"denoise": [], "condition": []}
    for name in counts:
        method = getattr(model, name)

        def counted(first: Tensor, *rest: Any, name: str = name, method: Any = method, **more: Any) -> Any:
            counts[name].append(len(first))
            return method(first, *rest, **more)

        monkeypatch.setattr(model, name, counted)
    run(model, case, guidance, steps=5)
    assert counts == {"denoise": [rows] * 5, "condition": [3]}


# -- two stages -----------------------------------------------------------------------------------------------------


def test_without_guidance_nothing_is_simulated(model: WorldModel, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    denoise = model.denoise

    def counted(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        calls.append(len(x))
        return denoise(x, *rest, **more)

    monkeypatch.setattr(model, "denoise", counted)
    out = two_stages(model, case.first, None, case.inputs, case.sim_inputs, case.noise, 2, 3, Guidance(0.0))
    assert out.sim is None
    assert torch.equal(out.real, run(model, case))
    assert calls == [3, 3, 3, 3, 3, 3]  # three steps here, three of the comparison


def test_guidance_needs_the_simulated_first_frame(model: WorldModel, case: Case) -> None:
    with pytest.raises(SimForcingError, match="needs the simulated first frame"):
        two_stages(model, case.first, None, case.inputs, case.sim_inputs, case.noise)


def test_both_stages_start_from_the_same_noise_with_their_own_inputs(model: WorldModel, case: Case) -> None:
    other = WorldModel(model.config).eval()  # other weights
    out = two_stages(
        model, case.first, case.first_sim, case.inputs, case.sim_inputs, case.noise, 2, 3, Guidance(0.6), other
    )
    assert out.sim is not None
    assert torch.equal(out.sim, sample(other, case.first_sim, case.sim_inputs, case.noise, 2))
    assert not torch.equal(out.sim, sample(model, case.first_sim, case.sim_inputs, case.noise, 2))
    expected = sample(model, case.first, case.inputs, case.noise, 3, out.sim, Guidance(0.6))
    assert torch.equal(out.real, expected)


def test_default_is_one_step_of_simulation_and_ten_of_video(
    model: WorldModel, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    denoise = model.denoise

    def counted(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        rows.append(len(x))
        return denoise(x, *rest, **more)

    monkeypatch.setattr(model, "denoise", counted)
    two_stages(model, case.first, case.first_sim, case.inputs, case.sim_inputs, case.noise)
    assert rows == [3] + [6] * 10
    assert Guidance() == Guidance(0.6, "branches")


def test_guidance_without_simulation_is_refused(model: WorldModel, case: Case) -> None:
    with pytest.raises(SimForcingError, match=r"w = 0\.6 needs simulation"):
        sample(model, case.first, case.inputs, case.noise, 3, None, Guidance(0.6))


def test_a_model_without_simulation_cannot_be_guided(model: WorldModel, case: Case) -> None:
    teacher = WorldModel(replace(model.config, sim_condition=False)).eval()
    assert run(teacher, case).shape == case.noise.shape
    with pytest.raises(SimForcingError, match="no simulation condition"):
        run(teacher, case, Guidance(0.6))


# -- noise ----------------------------------------------------------------------------------------------------------


def test_noise_belongs_to_the_clip_and_not_to_its_place() -> None:
    first = torch.zeros(3, 2, 1, 4, 4)
    noise = start_noise(first, 5, [7, 8, 7])
    assert noise.shape == (3, 2, 5, 4, 4)
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(start_noise(first[:1], 5, [8])[0], noise[1])
    assert float(noise.std()) == pytest.approx(1, abs=0.15)


def test_every_clip_needs_a_seed() -> None:
    with pytest.raises(SimForcingError, match="2 seeds for 3 clips"):
        start_noise(torch.zeros(3, 2, 1, 4, 4), 5, [7, 8])
