"""The two experts: their parameters, embeddings and the block arithmetic that both share.

Legend: B batch, F latent frames, H W latent grid, S tokens (f h w order, `hw` a frame), G groups of tokens that share a
time, A action steps, D width, h heads, d head width, L context tokens, C channels.

A video expert's parameters carry the names of diffusers' `WanTransformer3DModel`, so hub weights load as they are.
An expert may be narrower than its attention (h d != D): the action expert shares the video expert's heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import torch
import torch.nn.functional as functional
from einops import rearrange
from jaxtyping import Complex64, Float, Float32
from torch import Tensor, nn

from simforcing.errors import InputError

KeysValues = tuple[Float[Tensor, "B h S d"], Float[Tensor, "B h S d"]]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ExpertConfig:
    """Sizes of one expert. The paper's: 30 layers, 24 heads of 128; width 3072 (video) and 1024 (action)."""

    dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    head_dim: int
    text_dim: int
    freq_dim: int = 256
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.head_dim < 6:
            raise InputError(
                f"head_dim = {self.head_dim}: rotary pairs over frame, height and width need an even 6 or more"
            )
        if self.freq_dim % 2:
            raise InputError(f"freq_dim = {self.freq_dim}: pairs of cosine and sine need an even number")

    @property
    def attention_dim(self) -> int:
        """Width of queries, keys and values over all heads."""
        return self.num_heads * self.head_dim


def sinusoid(timestep: Float32[Tensor, "*B"], dim: int) -> Float32[Tensor, "*B {dim}"]:
    """[cos(t w_k), sin(t w_k)], w_k = 10000^(-2k/dim), computed in float64."""
    rates = torch.exp(
        -math.log(10000.0) / (dim // 2) * torch.arange(dim // 2, dtype=torch.float64, device=timestep.device)
    )
    angle = timestep.double()[..., None] * rates
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def _turns(positions: Tensor, dim: int) -> Tensor:
    """Unit complex numbers of a 1-D rotary table, float64: one row a position, dim/2 columns."""
    rates = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = positions.double()[:, None] * rates
    return torch.polar(torch.ones_like(angle), angle)


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """How a head's width is shared by the frame, height and width axes of the rotary table."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


# Rotary tables are small and the same in every call, so each is made once for a device. Out of inference mode, because
# a table made in it could not be used in training later.


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def video_rope(
    frames: int, height: int, width: int, head_dim: int, device: torch.device | None = None
) -> Complex64[Tensor, "S half_d"]:
    """Rotary table of video tokens in f, h, w order."""
    table = [_turns(torch.arange(n), d) for n, d in zip((frames, height, width), axis_dims(head_dim), strict=True)]
    f, h, w = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    turns = torch.cat([t[i.flatten()] for t, i in zip(table, (f, h, w), strict=True)], dim=1)
    return turns.to(device, torch.complex64)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def index_rope(steps: int, head_dim: int, device: torch.device | None = None) -> Complex64[Tensor, "A half_d"]:
    """Rotary table of action tokens by their index, over the whole head: the released model's."""
    return _turns(torch.arange(steps), head_dim).to(device, torch.complex64)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def frame_rope(
    steps: int, frames: int, head_dim: int, device: torch.device | None = None
) -> Complex64[Tensor, "A half_d"]:
    """Rotary table of action tokens on the video's own time axis, no turn in height and width.

    Latent frame 0 is pixel frame 0; latent frame k holds the next `steps / (frames - 1)` action steps. Action i leads
    to the pixel that is i + 1 steps after the first, so with stride s its place is (i + 1 + (s - 1) / 2) / s.
    """
    stride = steps / max(frames - 1, 1)
    time = (torch.arange(steps, dtype=torch.float64) + 1 + (stride - 1) / 2) / stride
    turns = _turns(time, axis_dims(head_dim)[0])
    rest = turns.new_ones(steps, head_dim // 2 - turns.shape[1])
    return torch.cat([turns, rest], dim=1).to(device, torch.complex64)


def rotate(x: Float[Tensor, "B S h d"], rope: Complex64[Tensor, "S half_d"]) -> Float[Tensor, "B S h d"]:
    """Turns adjacent pairs of each head by the table, in float32."""
    if torch.compiler.is_compiling():  # compilers fuse real arithmetic; eager, one complex product is 20 times faster
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = torch.view_as_real(rope[:, None]).unbind(-1)
        return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).to(x.dtype)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).to(x.dtype)


def attend(
    q: Float[Tensor, "B h Q d"],
    k: Float[Tensor, "B h K d"],
    v: Float[Tensor, "B h K d"],
    mask: Tensor | None = None,
) -> Float[Tensor, "B h Q d"]:
    """softmax(q k^T / sqrt(d)) v. On a CPU in training, written out: the fused kernel's backward is slower there."""
    if q.device.type == "cpu" and torch.is_grad_enabled():
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        scores = scores.softmax(dim=-1)
        return torch.matmul(scores, v)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm without parameters, times (1 + scale), plus shift."""
    if scale.numel() == x.shape[-1]:  # one time for all tokens: the norm's own fused gain and bias
        return functional.layer_norm(x, x.shape[-1:], 1 + scale.flatten(), shift.flatten(), eps)
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)


def gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """GELU in its tanh form, 0.5 x (1 + tanh(u)) = x sigmoid(2 u).

    On a CPU in inference by the second form, since torch's tanh takes three times as long as its sigmoid there.
    """
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return functional.gelu(x, approximate="tanh")
    rate = 2 * math.sqrt(2 / math.pi)
    double = torch.addcmul(x.new_tensor(rate), x, x, value=0.044715 * rate).mul_(x)
    return double.sigmoid_().mul_(x)


class Unit(nn.Module):
    """A module that is called with the work to be done with its parameters.

    One call is what DDP and FSDP hook into; `around`, where it is set, calls the work: it may compute it again in the
    backward pass, or in another type.
    """

    around: Callable[..., Any] | None = None

    def forward(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(self, *args)`."""
        return work(self, *args) if self.around is None else self.around(work, self, *args)

    def run(self, work: Callable[Concatenate[Self, P], R], *args: P.args, **none: P.kwargs) -> R:
        """Calls the unit, with types."""
        result: R = self(work, *args)
        return result


class Attention(nn.Module):
    """Projections of one attention layer; queries and keys are RMS-normed over all heads together."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        inner = config.attention_dim
        self.heads = config.num_heads
        self.to_q = nn.Linear(config.dim, inner)
        self.to_k = nn.Linear(config.dim, inner)
        self.to_v = nn.Linear(config.dim, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, config.dim)])
        self.norm_q = nn.RMSNorm(inner, eps=config.eps)
        self.norm_k = nn.RMSNorm(inner, eps=config.eps)

    def query(self, x: Float[Tensor, "B S D"], rope: Tensor | None = None) -> Float[Tensor, "B h S d"]:
        """Queries, one row a head."""
        return self._split(self.norm_q(self.to_q(x)), rope)

    def keys_values(self, x: Float[Tensor, "B S D"], rope: Tensor | None = None) -> KeysValues:
        """Keys and values, one row a head."""
        return self._split(self.norm_k(self.to_k(x)), rope), self._split(self.to_v(x), None)

    def out(self, heads: Float[Tensor, "B h S d"]) -> Float[Tensor, "B S D"]:
        """Joins the heads and maps them back to the expert's width."""
        result: Tensor = self.to_out[0](rearrange(heads, "b h s d -> b s (h d)"))
        return result

    def _split(self, x: Tensor, rope: Tensor | None) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1))
        return (x if rope is None else rotate(x, rope)).transpose(1, 2)


class _Projection(nn.Module):
    """A Linear under the name that diffusers gives it inside a feed-forward net."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, inner)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.proj(x))


class FeedForward(nn.Module):
    """Linear, GELU (tanh), Linear."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([_Projection(dim, inner), nn.Identity(), nn.Linear(inner, dim)])

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        result: Tensor = self.net[2](self.net[0](x))
        return result


class Block(Unit):
    """Parameters of one transformer block, and its parts that follow the (joint) self-attention."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn1 = Attention(config)
        self.attn2 = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.eps)
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)

    def modulation(self, time: Float[Tensor, "B n 6 D"]) -> tuple[Tensor, ...]:
        """Shift, scale and gate of attention, then of the feed-forward net; each [B, n, 1, D], n groups of tokens."""
        return tuple((self.scale_shift_table + time).unsqueeze(2).unbind(3))

    def cross(self, x: Float[Tensor, "B S D"], text: KeysValues, mask: Tensor | None) -> Float[Tensor, "B S D"]:
        """x + attention to the context."""
        return x + self.attn2.out(attend(self.attn2.query(self.norm2(x)), *text, mask))


class _TwoLinears(nn.Module):
    def __init__(self, first: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(first, dim)
        self.linear_2 = nn.Linear(dim, dim)


class ConditionEmbedder(nn.Module):
    """Embeds time and context."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.freq_dim = config.freq_dim
        self.time_embedder = _TwoLinears(config.freq_dim, config.dim)
        self.time_proj = nn.Linear(config.dim, 6 * config.dim)
        self.text_embedder = _TwoLinears(config.text_dim, config.dim)

    def time(self, timestep: Float32[Tensor, "B n"]) -> tuple[Float[Tensor, "B n D"], Float[Tensor, "B n 6 D"]]:
        """Time embedding, and its six modulation vectors for the blocks."""
        embedder = self.time_embedder
        features = sinusoid(timestep, self.freq_dim).to(embedder.linear_1.weight.dtype)
        embedding = embedder.linear_2(functional.silu(embedder.linear_1(features)))
        return embedding, self.time_proj(functional.silu(embedding)).unflatten(-1, (6, -1))

    def text(self, context: Float[Tensor, "B L X"]) -> Float[Tensor, "B L D"]:
        """Context tokens at the expert's width."""
        embedder = self.text_embedder
        result: Tensor = embedder.linear_2(gelu(embedder.linear_1(context)))
        return result


class Expert(nn.Module):
    """What both experts have: condition embedder and blocks."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.config = config
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])

    def text_keys_values(self, context: Float[Tensor, "B L X"]) -> list[KeysValues]:
        """Cross-attention keys and values of every block; they do not depend on the noise level."""
        tokens = self.condition_embedder.text(context)
        return [block.attn2.keys_values(tokens) for block in self.layers]

    @property
    def layers(self) -> list[Block]:
        """The blocks in order."""
        return cast(list[Block], list(self.blocks))


class VideoExpert(Expert):
    """Patches in, velocities out; parameter names are those of diffusers' `WanTransformer3DModel`."""

    def __init__(self, config: ExpertConfig, channels: int, patch: tuple[int, int, int]) -> None:
        super().__init__(config)
        self.patch = patch
        self.channels = channels
        self.patch_embedding = nn.Conv3d(channels, config.dim, kernel_size=patch, stride=patch)
        self.proj_out = nn.Linear(config.dim, channels * math.prod(patch))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def embed(self, latents: Float[Tensor, "B C F H W"]) -> Float[Tensor, "B S D"]:
        """Patch tokens in f, h, w order."""
        flat = patches(latents, self.patch).to(self.patch_embedding.weight.dtype)
        return patch_linear(flat, self.patch_embedding)

    def unembed(
        self, x: Float[Tensor, "B G n D"], embedding: Float[Tensor, "B G D"], grid: tuple[int, int, int]
    ) -> Float[Tensor, "B C F H W"]:
        """Head: modulated by the time embedding itself (not its projection), then patches back to latents.

        G groups of tokens share a time; `grid` counts patches.
        """
        shift, scale = (self.scale_shift_table[:, None] + embedding[:, :, None]).unsqueeze(3).unbind(2)
        y: Tensor = self.proj_out(modulated(x, shift, scale, self.config.eps)).flatten(1, 2)
        (f, h, w), (t, p, q) = grid, self.patch
        sizes = {"f": f, "h": h, "w": w, "t": t, "p": p, "q": q}
        latents: Tensor = rearrange(y, "b (f h w) (t p q c) -> b c (f t) (h p) (w q)", **sizes)
        return latents


class ActionExpert(Expert):
    """Action tokens in; `head` is the policy's and unused by a world model."""

    def __init__(self, config: ExpertConfig, action_dim: int) -> None:
        super().__init__(config)
        self.action_encoder = nn.Linear(action_dim, config.dim)
        self.head = nn.Linear(config.dim, action_dim)


def patches(latents: Float[Tensor, "B C F H W"], patch: tuple[int, int, int]) -> Float[Tensor, "B S CP"]:
    """Flattened patches in f, h, w order, channel slowest: the order of a Conv3d kernel."""
    t, p, q = patch
    return rearrange(latents, "b c (f t) (h p) (w q) -> b (f h w) (c t p q)", t=t, p=p, q=q)


def patch_linear(flat: Float[Tensor, "B S CP"], conv: nn.Conv3d) -> Float[Tensor, "B S D"]:
    """A Conv3d whose kernel is its stride, as one matrix product over patches."""
    return functional.linear(flat, conv.weight.flatten(1), conv.bias)
