"""A tiny policy, and the full computation that every shortcut is compared with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from einops import rearrange
from torch import Tensor

from simforcing.model.experts import Block, Expert, ExpertConfig, axis_dims, sinusoid
from simforcing.policy.objective import Batch
from simforcing.policy.policy import Policy, PolicyConfig

SIZES = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "text_dim": 8, "freq_dim": 16}
CONFIG = PolicyConfig(
    ExpertConfig(24, 48, **SIZES), ExpertConfig(16, 32, **SIZES), channels=3, proprio_dim=8, horizon=8, frames=3
)


@pytest.fixture(scope="session")
def config() -> PolicyConfig:
    return CONFIG


@pytest.fixture
def tiny() -> Callable[..., Policy]:
    def made(seed: int = 0, **changes: Any) -> Policy:
        torch.manual_seed(seed)
        policy = Policy(replace(CONFIG, **changes))
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if parameter.ndim == 1:  # norms and biases that are not ones and zeros
                    parameter.add_(0.2 * torch.randn(parameter.shape) * (1 if "norm" in name else 0.5))
        return policy.eval()

    return made


@pytest.fixture
def batch() -> Callable[..., Batch]:
    def made(rows: int = 2, seed: int = 1, masked: bool = False) -> Batch:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(rows, *shape, generator=g)

        mask = torch.ones(rows, 4, dtype=torch.bool)
        mask[0, 2:] = not masked
        return Batch(normal(3, 3, 4, 6), normal(8, 7), normal(8), normal(4, 8), mask)

    return made


# -- the full computation: both experts over all tokens, one dense mask ----------------------------------------------


def _turns(positions: Tensor, dim: int) -> Tensor:
    angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.polar(torch.ones_like(angle), angle)


def _video_turns(f: int, h: int, w: int, head: int) -> Tensor:
    axes = torch.meshgrid(torch.arange(f), torch.arange(h), torch.arange(w), indexing="ij")
    return torch.cat([_turns(axis.flatten(), d) for axis, d in zip(axes, axis_dims(head), strict=True)], dim=1)


def dense_mask(variant: str, frames: int, frame: int, actions: int, copies: int) -> Tensor:
    """Rows are queries, in the order video, its watched copy (where there are two copies), actions."""
    video = frames * frame
    own = torch.ones(video, video, dtype=torch.bool)
    own[:frame, frame:] = False
    mask = torch.block_diag(*[own] * copies, torch.ones(actions, actions, dtype=torch.bool)).bool()
    start = (copies - 1) * video
    mask[copies * video :, start : start + (frame if variant == "first-frame" else video)] = True
    return mask


def _time(expert: Expert, t: Tensor) -> tuple[Tensor, Tensor]:
    embedder, mlp = expert.condition_embedder, expert.condition_embedder.time_embedder
    e = mlp.linear_2(functional.silu(mlp.linear_1(sinusoid(t, embedder.freq_dim))))
    return e, embedder.time_proj(functional.silu(e)).unflatten(-1, (6, -1))


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def _heads(x: Tensor, n: int) -> Tensor:
    return rearrange(x, "b s (n d) -> b n s d", n=n)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).float()


def _after(block: Block, x: Tensor, heads: Tensor, parts: Any, text: Tensor, text_mask: Tensor) -> Tensor:
    x = x + parts[2] * block.attn1.to_out[0](rearrange(heads, "b n s d -> b s (n d)"))
    cross = block.attn2
    q = _heads(cross.norm_q(cross.to_q(block.norm2(x))), cross.heads)
    k, v = _heads(cross.norm_k(cross.to_k(text)), cross.heads), _heads(cross.to_v(text), cross.heads)
    seen = functional.scaled_dot_product_attention(q, k, v, text_mask[:, None, None])
    x = x + cross.to_out[0](rearrange(seen, "b n s d -> b s (n d)"))
    hidden = functional.gelu(block.ffn.net[0].proj(_norm(x) * (1 + parts[4]) + parts[3]), approximate="tanh")
    return x + parts[5] * block.ffn.net[2](hidden)


@torch.no_grad()
def dense(
    policy: Policy, copies: list[tuple[Tensor, Tensor]], action: Tensor, t_a: Tensor, context: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Velocities of the video (its first copy) and of actions. `copies`: latents and their time, frame 0 clean."""
    config, (f, h, w) = policy.config, copies[0][0].shape[2:]
    h, w = h // 2, w // 2
    grids = [policy.video.patch_embedding(x).flatten(2).transpose(1, 2) for x, _ in copies]
    times = [t[:, None].repeat(1, f * h * w).index_fill(1, torch.arange(h * w), 0.0) for _, t in copies]
    streams: list[tuple[Expert, Tensor, Tensor, Tensor]] = [
        (policy.video, torch.cat(grids, 1), torch.cat(times, 1), _video_turns(f, h, w, 12).repeat(len(copies), 1)),
        (policy.action, policy.action.action_encoder(action), t_a[:, None], _turns(torch.arange(action.shape[1]), 12)),
    ]
    if config.action_positions == "frame":
        stride = config.horizon / (f - 1)
        turns = _turns((torch.arange(config.horizon) + 1 + (stride - 1) / 2) / stride, axis_dims(12)[0])
        rest = torch.ones(config.horizon, 6 - turns.shape[1], dtype=turns.dtype)
        streams[1] = (*streams[1][:3], torch.cat([turns, rest], 1))
    xs = [x for _, x, _, _ in streams]
    embedded = [_time(expert, t) for expert, _, t, _ in streams]
    texts = []
    for expert, *_ in streams:
        mlp = expert.condition_embedder.text_embedder
        texts.append(mlp.linear_2(functional.gelu(mlp.linear_1(context), approximate="tanh")))
    visible = dense_mask(config.variant, f, h * w, action.shape[1], len(copies))
    lengths = [x.shape[1] for x in xs]
    for i in range(config.video.num_layers):
        parts, qkv = [], []
        for (expert, _, _, turns), x, (_, time) in zip(streams, xs, embedded, strict=True):
            block = expert.layers[i]
            parts.append((block.scale_shift_table[:, None] + time).unbind(2))
            y, n = _norm(x) * (1 + parts[-1][1]) + parts[-1][0], block.attn1.heads
            q = _turned(_heads(block.attn1.norm_q(block.attn1.to_q(y)), n), turns)
            k = _turned(_heads(block.attn1.norm_k(block.attn1.to_k(y)), n), turns)
            qkv.append((q, k, _heads(block.attn1.to_v(y), n)))
        q, k, v = (torch.cat(both, dim=2) for both in zip(*qkv, strict=True))
        heads = functional.scaled_dot_product_attention(q, k, v, visible).split(lengths, dim=2)
        xs = [
            _after(expert.layers[i], x, z, p, text, mask)
            for (expert, *_), x, z, p, text in zip(streams, xs, heads, parts, texts, strict=True)
        ]
    n = f * h * w
    shift, scale = (policy.video.scale_shift_table[:, None] + embedded[0][0][:, :n, None]).unbind(2)
    y = policy.video.proj_out(_norm(xs[0][:, :n]) * (1 + scale) + shift)
    video = rearrange(y, "b (f h w) (p q c) -> b c f (h p) (w q)", f=f, h=h, w=w, p=2, q=2)
    return video, policy.action.head(xs[1])


@pytest.fixture
def full() -> Callable[..., tuple[Tensor, Tensor]]:
    return dense
