"""The joint forward: every output, every intermediate, every block."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor

from simforcing.model import mixture
from simforcing.model.experts import KeysValues, attend, index_rope, modulated, sinusoid, video_rope
from simforcing.model.world_model import WorldModel

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
ZERO = torch.zeros(1, 1)
Tensors = dict[str, Tensor]


def arguments(model: WorldModel, t: Tensors, case: str) -> dict[str, Any]:
    """Those of `velocity` for the case whose letter this is."""
    context, mask = model.context(t["in.context"], t["in.context_mask"], t["in.proprio"])
    plain = {
        "latents": t["in.latents"], "timestep": t["in.timestep"], "action": t["in.action"], "context": context,
        "context_mask": mask,
    }  # fmt: skip
    changes = {
        "a": {},
        "b": {"action": None},
        "c": {"sim_latents": t["in.sim_latents"], "sim_gate": t["in.c_gate"]},
        "d": {"sim_latents": t["in.sim_latents"], "sim_gate": t["in.d_gate"]},
        "e": {"sim_latents": t["in.sim_latents"]},
        "f": {"action": torch.zeros_like(t["in.action"])},
        "g": {"first_frame_clean": False},
    }
    return plain | changes[case]


@pytest.mark.parametrize("grad", [False, True])
def test_outputs(student: WorldModel, forward: Tensors, forward_case: str, grad: bool) -> None:
    """In training as in inference; they attend by different routes on a CPU."""
    with torch.set_grad_enabled(grad):
        found = student.velocity(**arguments(student, forward, forward_case[0]))
    torch.testing.assert_close(found, forward[f"out.{forward_case}"], **CLOSE)


@torch.no_grad()
def test_context_with_its_proprioception_token(student: WorldModel, forward: Tensors) -> None:
    context, mask = student.context(forward["in.context"], forward["in.context_mask"], forward["in.proprio"])
    torch.testing.assert_close(context, forward["mid.context_with_proprio"], **CLOSE)
    assert torch.equal(mask, forward["mid.context_mask_with_proprio"])
    for expert in ("video", "action"):
        tokens = getattr(student, expert).condition_embedder.text(context)
        torch.testing.assert_close(tokens, forward[f"mid.{expert}.context_emb"], **CLOSE)
    condition = student.condition(forward["in.action"], context, mask, forward["in.latents"].shape[2:])
    seen = mask[:, None, None] if condition.text_mask is None else condition.text_mask
    for expert in ("video", "action"):
        dense = forward[f"mid.{expert}.context_attn_mask"]
        assert torch.equal(seen[:, 0].expand_as(dense), dense)


@torch.no_grad()
def test_embedded_inputs(student: WorldModel, forward: Tensors) -> None:
    torch.testing.assert_close(student.video.embed(forward["in.latents"]), forward["mid.video.tokens"], **CLOSE)
    tokens = student.action.action_encoder(forward["in.action"])
    torch.testing.assert_close(tokens, forward["mid.action.tokens"], **CLOSE)


@torch.no_grad()
def test_embedded_times(
    student: WorldModel, forward: Tensors, read: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times are embedded, the first frame's and the others'; the reference embeds one a token."""
    embedder, modulation = student.video.condition_embedder, read("forward_trace")[0]
    given: list[Tensor] = []
    embed = embedder.time

    def watched(times: Tensor) -> Any:
        given.append(times)
        return embed(times)

    monkeypatch.setattr(embedder, "time", watched)
    student.velocity(**arguments(student, forward, "a"))
    (times,) = given
    expected = forward["mid.video.token_timesteps"]
    frame = expected.shape[1] // (forward["in.latents"].shape[2] // student.config.patch[0])
    counts = torch.tensor([frame, expected.shape[1] - frame])

    def a_token(x: Tensor) -> Tensor:
        return x.repeat_interleave(counts, dim=1)

    assert torch.equal(a_token(times), expected)
    found = sinusoid(forward["in.timestep"], student.config.video.freq_dim)
    torch.testing.assert_close(found, forward["mid.video.sinusoid"], **CLOSE)
    torch.testing.assert_close(sinusoid(ZERO[0], student.config.action.freq_dim), forward["mid.action.sinusoid"])
    embedding, parts = embed(times)
    torch.testing.assert_close(a_token(embedding), forward["mid.video.t"], **CLOSE)
    torch.testing.assert_close(a_token(parts), modulation["mid.video.t_mod"], **CLOSE)
    embedding, parts = student.action.condition_embedder.time(ZERO)
    torch.testing.assert_close(embedding[:, 0].expand_as(forward["mid.action.t"]), forward["mid.action.t"], **CLOSE)
    expected = modulation["mid.action.t_mod"]
    torch.testing.assert_close(parts[:, 0].expand_as(expected), expected, **CLOSE)


def test_rotary_tables(student: WorldModel, forward: Tensors) -> None:
    grid = [n // p for n, p in zip(forward["in.latents"].shape[2:], student.config.patch, strict=True)]
    tables = {
        "video": video_rope(*grid, student.config.video.head_dim),
        "action": index_rope(forward["in.action"].shape[1], student.config.action.head_dim),
    }
    for expert, table in tables.items():
        for part, name in ((table.real, "cos"), (table.imag, "sin")):
            torch.testing.assert_close(part.double(), forward[f"mid.{expert}.rope_{name}"], atol=1e-7, rtol=0)


@torch.no_grad()
def test_simulation_residuals(student: WorldModel, forward: Tensors) -> None:
    found = student.sim_residuals(forward["in.sim_latents"])
    assert found is not None
    expected = rearrange(forward["mid.sim_cond.block0"], "b d f h w -> b (f h w) d")
    torch.testing.assert_close(found.values[0], expected, **CLOSE)


def test_who_attends_to_whom(student: WorldModel, forward: Tensors) -> None:
    """There is no mask in the code; a query sees exactly the keys whose values have a share in its output."""
    layers = [student.video.layers[0].attn1, student.action.layers[0].attn1]
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    hooks = [a.to_v.register_forward_hook(lambda m, i, out: values.append(out)) for a in layers]
    hooks += [a.to_out[0].register_forward_pre_hook(lambda m, i: outputs.append(i[0])) for a in layers]
    student.velocity(**arguments(student, forward, "a"))
    for hook in hooks:
        hook.remove()
    by_count = {x.shape[1]: i for i, x in enumerate(values)}
    video, action = forward["mid.video.tokens"].shape[1], forward["mid.action.tokens"].shape[1]
    assert sorted(by_count) == sorted((video, action))
    keys = [values[by_count[n]] for n in (video, action)]
    rows = []
    for count in (video, action):
        output = next(x for x in outputs if x.shape[1] == count)
        for query in range(count):
            shares = torch.autograd.grad(output[0, query].sum(), keys, retain_graph=True, allow_unused=True)
            seen = [
                torch.zeros(k.shape[1]) if s is None else s[0].abs().sum(-1) for s, k in zip(shares, keys, strict=True)
            ]
            rows.append(torch.cat(seen) > 0)
    assert torch.equal(torch.stack(rows), forward["mid.attention_mask"])


def action_blocks(model: WorldModel, a: dict[str, Any]) -> Iterator[tuple[Tensor, KeysValues]]:
    """Tokens, and keys and values, of each action block: also what follows the last one's, which no video needs."""
    x, text = model.action.action_encoder(a["action"]), model.action.text_keys_values(a["context"])
    rope = index_rope(x.shape[1], model.config.action.head_dim)
    _, time = model.action.condition_embedder.time(ZERO)
    for block, words in zip(model.action.layers, text, strict=True):
        parts = [part.squeeze(1) for part in block.modulation(time)]
        normed = modulated(x, *parts[:2], block.eps)
        seen = block.attn1.keys_values(normed, rope)
        x = x + parts[2] * block.attn1.out(attend(block.attn1.query(normed, rope), *seen))
        x = block.cross(x, words, a["context_mask"][:, None, None])
        x = x + parts[5] * block.ffn(modulated(x, *parts[3:5], block.eps))
        yield x, seen


@torch.no_grad()
def test_blocks(
    student: WorldModel, forward: Tensors, read: Callable[[str], Any], traced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = re.fullmatch(r"(.+)\.block(\d+)\.(video|action)", traced)
    assert name
    inputs, block = arguments(student, forward, name[1]), int(name[2])
    if name[3] == "action":
        tokens, seen = list(action_blocks(student, inputs))[block]
        grid = inputs["latents"].shape[2:]
        before = student.condition(inputs["action"], inputs["context"], inputs["context_mask"], grid).before
        assert before is not None
        torch.testing.assert_close(before[block], seen, atol=1e-6, rtol=1e-5)
    else:
        after: list[Tensor] = []
        leave = mixture._leave

        def watched(*arguments: Any) -> Tensor:
            after.append(leave(*arguments))
            return after[-1]

        monkeypatch.setattr(mixture, "_leave", watched)
        student.velocity(**inputs)
        tokens = after[block].flatten(1, 2)
    torch.testing.assert_close(tokens, read("forward_trace")[0][f"mid.{traced}"], **CLOSE)
