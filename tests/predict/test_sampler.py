"""The sampler: what each kind of guidance is and costs, what is computed once, and what is refused."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.model.flow import Flow
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.predict.sampler import (
    Guidance,
    Inputs,
    SamplerConfig,
    sample,
    shared_condition,
    solved,
    start_noise,
    two_stages,
)

SAME: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
GUIDANCES = [
    Guidance(0.0),
    Guidance(0.35),
    Guidance(1.0),
    Guidance(1.5),
    Guidance(0.35, "soft"),
    Guidance(0.0, action=2.0),
    Guidance(0.35, action=1.5),
    Guidance(1.0, action=1.5),
    Guidance(0.35, "soft", action=0.5),
]


def tiny(seed: int = 0, layers: int = 2, **changes: Any) -> WorldModel:
    """Small; its simulation projections are not zero, so that the condition matters."""
    sizes = {"num_layers": layers, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
    config = WorldModelConfig(ExpertConfig(24, 48, **sizes), ExpertConfig(16, 32, **sizes), channels=3)
    torch.manual_seed(seed)
    found = WorldModel(replace(config, **changes))
    if found.sim is not None:
        with torch.no_grad():
            for parameter in found.sim.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return found.eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order only, so that equal calls are equal to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> WorldModel:
    return tiny()


class Case:
    """Random inputs of three clips, two of which have fewer words than the third."""

    def __init__(self, frames: int = 3) -> None:
        g = torch.Generator().manual_seed(1)
        self.first, self.first_sim = torch.randn(2, 3, 3, 1, 4, 4, generator=g)
        self.sim = torch.randn(3, 3, frames, 4, 4, generator=g)
        mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
        shapes = ((4 * (frames - 1), 7), (7,), (3, 8))
        numbers = [[torch.randn(3, *shape, generator=g) for shape in shapes] for _ in range(2)]
        self.inputs, self.sim_inputs = (Inputs(*three, mask) for three in numbers)
        self.noise = start_noise(self.first, frames, [5, 6, 7])

    def row(self, i: int) -> Inputs:
        a = self.inputs
        return Inputs(*(x[i : i + 1] for x in (a.action, a.proprio, a.text, a.text_mask)))


@pytest.fixture
def case() -> Case:
    return Case()


def run(model: WorldModel, case: Case, guidance: Guidance = Guidance(0.0), steps: int = 3, **more: Any) -> Tensor:
    arguments = {"first": case.first, "sim_latents": case.sim} | more
    return sample(model, inputs=case.inputs, noise=case.noise, steps=steps, guidance=guidance, **arguments)


@torch.no_grad()
def by_hand(model: WorldModel, case: Case, guidance: Guidance = Guidance(0.0), steps: int = 3) -> list[Tensor]:
    """The states of a rollout by the one-call forward, which remembers nothing: each velocity on its own."""
    context, mask = model.context(case.inputs.text, case.inputs.text_mask, case.inputs.proprio)
    action, w = case.inputs.action, guidance.w
    states = [torch.cat([case.first, case.noise[:, :, 1:]], dim=2)]
    for t, delta in zip(*model.flow.steps(steps), strict=True):

        def velocity(gate: float, action: Tensor = action, t: Tensor = t) -> Tensor:
            gates = torch.full((3,), gate)
            return model.velocity(states[-1], t.expand(3), action, context, mask, case.sim, gates)

        if guidance.kind == "soft":
            v, strongest = velocity(w), w
        else:
            v, strongest = velocity(0) + w * (velocity(1) - velocity(0)), 1.0 if w else 0.0
        v = v + (guidance.action - 1) * (velocity(strongest) - velocity(strongest, 0 * action))
        states.append(torch.cat([case.first, (states[-1] + delta * v)[:, :, 1:]], dim=2))
    return states


def states_of(model: WorldModel, case: Case, *rest: Any, **more: Any) -> list[Tensor]:
    """What the sampler gives to each step, and its result."""
    states: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        denoise = model.denoise

        def watched(x: Tensor, *a: Any, **b: Any) -> Tensor:
            states.append(x)
            return denoise(x, *a, **b)

        patch.setattr(model, "denoise", watched)
        result = run(model, case, *rest, **more)
        return [*states, result]


def watch(model: WorldModel, monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, list[int]]:
    """How many samples each call of these methods gets."""
    counts: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        method = getattr(model, name)

        def counted(first: Tensor | None, *rest: Any, name: str = name, method: Any = method, **more: Any) -> Any:
            counts[name] += [] if first is None else [len(first)]
            return method(first, *rest, **more)

        monkeypatch.setattr(model, name, counted)
    return counts


# -- guidance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", GUIDANCES, ids=str)
@pytest.mark.parametrize("attention", ["first_frame_causal", "bidirectional"])
def test_every_step_equals_the_one_call_forward(case: Case, guidance: Guidance, attention: str) -> None:
    model = tiny(attention=attention)
    found, expected = states_of(model, case, guidance), by_hand(model, case, guidance)
    assert len(found) == len(expected) == 4
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, :, -2:], plain[:, :, 1:], **SAME)
    assert float((found[-1] - run(model, case, Guidance(0.7)))[:, :, 1:].abs().max()) > 1e-3


@settings(max_examples=15, deadline=None)
@given(
    w=st.floats(0, 1.5),
    kind=st.sampled_from(["branches", "soft"]),
    action=st.sampled_from([0.0, 1.0, 1.7]),
    frames=st.integers(2, 4),
    steps=st.integers(1, 3),
    layers=st.integers(1, 3),
)
def test_any_rollout_equals_the_one_call_forward(
    w: float, kind: Any, action: float, frames: int, steps: int, layers: int
) -> None:
    model, case, guidance = tiny(layers=layers), Case(frames), Guidance(w, kind, action)
    expected = by_hand(model, case, guidance, steps)[-1]
    torch.testing.assert_close(run(model, case, guidance, steps), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("guidance", GUIDANCES[:6], ids=str)
def test_bfloat16_weights_change_little(case: Case, guidance: Guidance) -> None:
    """Cached and uncached differ by what the weights' rounding makes of another order of sums."""
    model, case = tiny().bfloat16(), case
    exact = by_hand(tiny(), case, guidance)[-1]
    ours, plain = run(model, case, guidance), by_hand(model, case, guidance)[-1]
    scale = float(exact.std())
    assert ours.dtype == torch.float32
    assert float((ours - plain).abs().mean()) < 0.01 * scale
    assert float((ours - exact).abs().mean()) < 0.03 * scale


def test_no_guidance_is_no_simulation(model: WorldModel, case: Case) -> None:
    plain = run(model, case, sim_latents=None)
    for guidance in (Guidance(0.0), Guidance(0.0, "soft")):
        assert torch.equal(run(model, case, guidance), plain)
        assert torch.equal(run(model, case, guidance, sim_latents=case.sim * math.nan), plain)


def test_full_guidance_is_one_branch_of_either_kind(model: WorldModel, case: Case) -> None:
    assert torch.equal(run(model, case, Guidance(1.0, "soft")), run(model, case, Guidance(1.0)))
    assert len(Guidance(1.0).branches()) == len(Guidance(0.0).branches()) == len(Guidance(0.3, "soft").branches()) == 1


@given(w=st.floats(-1, 2), action=st.floats(-1, 3), kind=st.sampled_from(["branches", "soft"]))
def test_shares_of_the_branches_sum_to_one(w: float, action: float, kind: Any) -> None:
    branches = Guidance(w, kind, action).branches()
    assert sum(b.share for b in branches) == pytest.approx(1)
    assert sum(b.zero_action for b in branches) == (action != 1)
    if kind == "branches":
        assert sum(b.share * b.gate for b in branches if not b.zero_action) == pytest.approx(
            w + (action - 1) * (w != 0)
        )


@pytest.mark.parametrize("guidance", GUIDANCES, ids=str)
def test_batch_equals_loop(model: WorldModel, case: Case, guidance: Guidance) -> None:
    together = run(model, case, guidance)
    for i in range(3):
        part = slice(i, i + 1)
        noise = start_noise(case.first[part], 3, [5 + i])
        alone = sample(model, case.first[part], case.row(i), noise, 3, case.sim[part], guidance)
        torch.testing.assert_close(alone[0], together[i], **SAME)


@pytest.mark.parametrize("guidance", GUIDANCES[:3], ids=str)
def test_the_first_frame_is_the_given_one(model: WorldModel, case: Case, guidance: Guidance) -> None:
    before = case.noise.clone()
    out = run(model, case, guidance)
    assert torch.equal(out[:, :, :1], case.first)
    assert out.dtype == torch.float32
    assert not torch.equal(out[:, :, 1:], case.noise[:, :, 1:])
    assert torch.equal(case.noise, before)
    assert torch.equal(run(model, case, guidance), out)


# -- corrections ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("config", [SamplerConfig(), SamplerConfig(true_first_time=False)])
def test_a_first_frame_that_is_not_given_is_embedded_with_its_own_time(
    model: WorldModel, case: Case, config: SamplerConfig
) -> None:
    found = run(model, case, first=None, config=config)
    context, mask = model.context(case.inputs.text, case.inputs.text_mask, case.inputs.proprio)
    ends = {}
    for clean in (True, False):
        x = case.noise
        for t, delta in zip(*model.flow.steps(3), strict=True):
            x = x + delta * model.velocity(x, t.expand(3), case.inputs.action, context, mask, first_frame_clean=clean)
        ends[clean] = x
    torch.testing.assert_close(found, ends[not config.true_first_time], **SAME)
    assert float((ends[True] - ends[False]).abs().max()) > 1e-3


@pytest.mark.parametrize("float32", [True, False])
def test_state_is_float32_whatever_the_weights_are(case: Case, float32: bool) -> None:
    model, times = tiny().bfloat16(), []
    denoise = model.denoise

    def watched(x: Tensor, timestep: Tensor, *rest: Any, **more: Any) -> Tensor:
        times.append(float(timestep))
        return denoise(x, timestep, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "denoise", watched)
        states = states_of(model, case, steps=5, config=SamplerConfig(float32_state=float32))
    rounded = [bool(torch.equal(x.float(), x.bfloat16().float())) for x in states[1:-1]]
    assert all(rounded) != float32
    assert any(rounded) != float32
    assert states[-1].dtype == torch.float32
    assert torch.equal(states[-1][:, :, :1], case.first)
    exact = Flow().steps(5).timesteps
    assert times == pytest.approx((exact if float32 else exact.bfloat16().float()).tolist(), rel=1e-6)


def test_released_turns_every_correction_off() -> None:
    assert SamplerConfig.released(shift=3.0) == SamplerConfig(3.0, true_first_time=False, float32_state=False)


def test_another_shift_is_that_of_another_schedule(model: WorldModel, case: Case) -> None:
    shifted = WorldModel(replace(model.config, flow=Flow(shift=3.0))).eval()
    shifted.load_state_dict(model.state_dict())
    found = run(model, case, config=SamplerConfig(shift=3.0))
    assert torch.equal(found, run(shifted, case))
    assert not torch.equal(found, run(model, case))


# -- what is computed once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guidance", "conditions"),
    [
        (Guidance(0.0), 1),
        (Guidance(1.0), 1),
        (Guidance(0.6), 1),
        (Guidance(0.6, "soft"), 1),
        (Guidance(0.6, action=2), 2),
    ],
    ids=str,
)
def test_each_step_is_one_call_on_the_later_frames(
    model: WorldModel, case: Case, monkeypatch: pytest.MonkeyPatch, guidance: Guidance, conditions: int
) -> None:
    """Guidance makes the batch larger, never the calls more; what no step changes is computed once."""
    counts = watch(model, monkeypatch, "denoise", "condition", "remember_first", "sim_residuals")
    assert all(x.shape == (3, 3, 2, 4, 4) for x in states_of(model, case, guidance, steps=5)[:-1])
    assert counts == {
        "denoise": [3] * 5,
        "condition": [3] * conditions,
        "remember_first": [3],
        "sim_residuals": [3] * (guidance.w > 0),
    }


@pytest.mark.parametrize(
    ("guidance", "rows"),
    [(Guidance(0.0), [3, 3, 3]), (Guidance(1.0), [3, 3, 3]), (Guidance(0.6), [3, 6, 6]),
     (Guidance(0.6, "soft"), [3, 3, 3]), (Guidance(0.6, action=2), [9, 9, 9])],
    ids=str,
)  # fmt: skip
def test_branches_that_differ_in_simulation_alone_share_the_attentions_of_the_first_block(
    case: Case, guidance: Guidance, rows: list[int]
) -> None:
    model, seen = tiny(layers=3), {}
    for i, block in enumerate(model.video.layers):
        block.attn1.to_q.register_forward_pre_hook(lambda _, x, i=i: seen.setdefault(i, []).append(x[0].shape))
    run(model, case, guidance)
    assert {i: [len_ for len_, tokens, _ in shapes if tokens == 8] for i, shapes in seen.items()} == {
        i: [n] * 3 for i, n in enumerate(rows)
    }
    # The first frame is not among those of a step; its last block is needed for keys and values alone.
    assert [sum(tokens == 4 for _, tokens, _ in seen[i]) for i in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("w", [0.35, 1.0])
def test_stages_with_the_same_inputs_embed_them_once(
    model: WorldModel, case: Case, monkeypatch: pytest.MonkeyPatch, w: float
) -> None:
    counts = watch(model, monkeypatch, "condition")
    arguments = (case.first, case.first_sim, case.inputs)
    one = two_stages(model, *arguments, case.inputs, case.noise, 2, 3, Guidance(w))
    assert counts["condition"] == [3]
    equal = Inputs(*(x.clone() for x in vars(case.inputs).values()))
    apart = two_stages(model, *arguments, equal, case.noise, 2, 3, Guidance(w))
    assert counts["condition"] == [3] * 3
    assert one.sim is not None
    assert apart.sim is not None
    assert torch.equal(one.sim, apart.sim)
    assert torch.equal(one.real, apart.real)


def test_a_condition_at_hand_serves_several_calls(
    model: WorldModel, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = shared_condition(model, case.inputs, case.noise.shape)
    expected = [run(model, case, g) for g in GUIDANCES]
    counts = watch(model, monkeypatch, "condition")
    for guidance, plain in zip(GUIDANCES, expected, strict=True):
        assert torch.equal(run(model, case, guidance, condition=shared), plain)
    assert len(counts["condition"]) == sum(g.action != 1 for g in GUIDANCES)  # zero actions are another condition


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
        velocity = denoise(x, *rest, **more)
        rows.append(len(velocity))
        return velocity

    monkeypatch.setattr(model, "denoise", counted)
    two_stages(model, case.first, case.first_sim, case.inputs, case.sim_inputs, case.noise)
    assert rows == [3] + [6] * 10
    assert Guidance() == Guidance(0.6, "branches")


def test_a_model_without_simulation_cannot_be_guided(model: WorldModel, case: Case) -> None:
    teacher = WorldModel(replace(model.config, sim_condition=False)).eval()
    assert run(teacher, case).shape == case.noise.shape
    with pytest.raises(SimForcingError, match="no simulation condition"):
        run(teacher, case, Guidance(0.6))


# -- refused --------------------------------------------------------------------------------------------------------


def changed(case: Case, **values: Tensor) -> dict[str, Any]:
    return {"inputs": replace(case.inputs, **values)}


BAD: dict[str, tuple[Callable[[Case], dict[str, Any]], str]] = {
    "simulation left out": (lambda c: {"sim_latents": None}, r"w = 0\.6 needs simulation latents"),
    "first": (lambda c: {"first": c.first[:2]}, r"first has shape \[2, 3, 1, 4, 4\], it must be \[3, 3, 1, 4, 4\]"),
    "simulation": (
        lambda c: {"sim_latents": c.sim[:, :, :2]},
        r"sim_latents has shape \[3, 3, 2, 4, 4\], it must be \[3, 3",
    ),
    "noise": (lambda c: {"noise": c.noise[0]}, r"(noise has|latents have) shape \[3, 3, 4, 4\].*\[B, 3, F, H, W\]"),
    "odd noise": (
        lambda c: {"noise": c.noise[..., :3], "first": c.first[..., :3], "sim_latents": c.sim[..., :3]},
        r"latents have F, H, W = \[3, 4, 3\].*multiples of the patch \[1, 2, 2\]",
    ),
    "action batch": (lambda c: changed(c, action=c.inputs.action[:2]), r"action has shape \[2, 8, 7\].*\[3, A, 7\]"),
    "action steps": (lambda c: changed(c, action=c.inputs.action[:, :7]), r"action has shape \[3, 7, 7\].*of the 2"),
    "NaN": (lambda c: changed(c, action=c.inputs.action / 0), r"action of shape \[3, 8, 7\] holds NaN or infinite"),
    "proprio": (lambda c: changed(c, proprio=c.inputs.proprio[:2]), r"proprio has shape \[2, 7\].*\[3, 7\]"),
    "text": (lambda c: changed(c, text=c.inputs.text[:2]), r"text has shape \[2, 3, 8\].*\[3, L, 8\]"),
    "text mask": (lambda c: changed(c, text_mask=c.inputs.text_mask[:2]), r"text_mask has shape \[2, 3\].*\[3, 3\]"),
    "blind mask": (
        lambda c: changed(c, text_mask=c.inputs.text_mask & False),
        r"text_mask of shape \[3, 3\] hides every",
    ),
    "steps": (lambda c: {"steps": 0}, "0 sampling steps: at least 1"),
}


@pytest.mark.parametrize("what", BAD)
def test_inputs_that_do_not_fit_are_refused(model: WorldModel, case: Case, what: str) -> None:
    change, message = BAD[what]
    given = {"first": case.first, "inputs": case.inputs, "noise": case.noise, "steps": 2, "sim_latents": case.sim}
    given |= change(case)
    with pytest.raises(ValueError, match=message):
        sample(model, **given, guidance=Guidance(0.6))
    first, inputs, noise, steps, _ = given.values()
    if not what.startswith("simulation"):
        with pytest.raises(ValueError, match=message):
            two_stages(model, first, first, inputs, inputs, noise, steps, steps)


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


# -- solvers, and guidance in part of the noise range ---------------------------------------------------------------


def test_euler_is_the_default_and_second_order_solvers_are_what_they_are_called(case: Case) -> None:
    model = tiny()
    default = run(model, case, Guidance(0.6))
    assert torch.equal(default, run(model, case, Guidance(0.6), config=SamplerConfig(solver="euler")))
    context, mask = model.context(case.inputs.text, case.inputs.text_mask, case.inputs.proprio)

    @torch.no_grad()
    def velocity(x: Tensor, t: float) -> Tensor:
        found = model.velocity(x, torch.full((3,), t), case.inputs.action, context, mask)
        return torch.cat([torch.zeros_like(case.first), found[:, :, 1:]], dim=2)

    x = torch.cat([case.first, case.noise[:, :, 1:]], dim=2)
    midpoint = heun = x
    times = [*model.flow.steps(2).timesteps.tolist(), 0.0]
    for i, delta in enumerate(model.flow.steps(2).deltas.tolist()):
        half = midpoint + delta / 2 * velocity(midpoint, times[i])
        midpoint = midpoint + delta * velocity(half, (times[i] + times[i + 1]) / 2)
        v = velocity(heun, times[i])
        if i == 0:
            v = (v + velocity(heun + delta * v, times[1])) / 2
        heun = heun + delta * v
    for solver, expected in (("midpoint", midpoint), ("heun", heun)):
        found = run(model, case, steps=2, config=SamplerConfig(solver=solver))
        torch.testing.assert_close(found, expected, **SAME)


@pytest.mark.parametrize(("solver", "least"), [("euler", 1.8), ("midpoint", 3.6), ("heun", 3.6)])
def test_error_falls_with_the_order_of_the_solver(solver: Any, least: float) -> None:
    start = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    exact = math.exp(-0.5)  # of dx / d sigma = sigma x from 1 to 0

    def error(steps: int) -> float:
        found = solved(start, lambda x, t: t / 1000 * x, Flow().steps(steps), solver)
        return abs(float(found) - exact)

    assert least < error(40) / error(80) < least + 0.9


@pytest.mark.parametrize("attention", ["first_frame_causal", "bidirectional"])
def test_guidance_in_part_of_the_noise_range(case: Case, attention: str) -> None:
    model, guidance = tiny(attention=attention), Guidance(0.6, noise=(0.8, 1.0))
    levels = (model.flow.steps(3).timesteps / model.flow.train_steps).tolist()
    assert [level >= 0.8 for level in levels] == [True, True, False]
    states = states_of(model, case, guidance)
    assert torch.equal(states[2], states_of(model, case, Guidance(0.6))[2])  # two steps are the same
    plain = states_of(model, case, Guidance(0.0))
    expected = by_hand(model, case, Guidance(0.6))
    context, mask = model.context(case.inputs.text, case.inputs.text_mask, case.inputs.proprio)
    with torch.no_grad():
        last = model.velocity(expected[2], torch.full((3,), 1000 * levels[2]), case.inputs.action, context, mask)
    delta = float(model.flow.steps(3).deltas[2])
    torch.testing.assert_close(states[3][:, :, 1:], (expected[2] + delta * last)[:, :, 1:], **SAME)
    assert not torch.equal(states[3], plain[3])
    everywhere = run(model, case, Guidance(0.6, noise=(0.0, 1.0)))
    assert torch.equal(everywhere, run(model, case, Guidance(0.6)))
    nowhere = run(model, case, Guidance(0.6, noise=(0.0, 0.1)))
    assert torch.equal(nowhere, run(model, case, Guidance(0.0)))


def test_levels_that_are_none_are_refused() -> None:
    for noise in ((0.5, 0.5), (-0.1, 1.0), (0.0, 1.1)):
        with pytest.raises(SimForcingError, match="0 <= low < high <= 1"):
            Guidance(0.6, noise=noise)
