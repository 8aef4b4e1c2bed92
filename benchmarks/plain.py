"""A plain implementation of what the released code computes, on the same weights: the yardstick of the benchmarks.

Legend: B batch, C channels, F latent frames, H W latent grid, S video tokens, A action tokens, L context tokens,
D width.

One clip at a time, one forward a guidance branch; every forward embeds its text, its actions and the time of every
token, builds rotary tables and dense masks, and runs both experts over all tokens in masked attention with rotations
in complex128. Nothing here is slower than it has to be for that: the operations are torch's own, in the released
order. Every run of a benchmark checks first that its numbers are ours.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional
from einops import rearrange
from torch import Tensor

from simforcing.model.experts import Attention, Block, Expert, VideoExpert
from simforcing.model.flow import Steps
from simforcing.model.world_model import WorldModel
from simforcing.train.objective import Batch, Draws, ObjectiveConfig, estimate, noisy

if TYPE_CHECKING:
    from common import Start


def sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """[cos, sin] of each time, in float64, cast to the time's dtype."""
    rates = torch.pow(10000, -torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angle = torch.outer(timestep.double(), rates)
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(timestep.dtype)


def turns(positions: int, dim: int) -> Tensor:
    """One-dimensional rotary table, complex128 [positions, dim / 2]."""
    rates = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), rates)
    return torch.polar(torch.ones_like(angle), angle)


def video_table(tables: tuple[Tensor, Tensor, Tensor], f: int, h: int, w: int) -> Tensor:
    """The three tables over the token grid, [f h w, 1, d / 2]."""
    parts = [
        tables[0][:f].view(f, 1, 1, -1).expand(f, h, w, -1),
        tables[1][:h].view(1, h, 1, -1).expand(f, h, w, -1),
        tables[2][:w].view(1, 1, w, -1).expand(f, h, w, -1),
    ]
    return torch.cat(parts, dim=-1).reshape(f * h * w, 1, -1)


def rotate(x: Tensor, table: Tensor, heads: int) -> Tensor:
    """Turns adjacent pairs in complex128."""
    x = rearrange(x, "b s (n d) -> b s n d", n=heads)
    pairs = torch.view_as_complex(x.to(torch.float64).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(2).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Masked attention over tokens [B, S, n d]."""
    q, k, v = (rearrange(x, "b s (n d) -> b n s d", n=heads) for x in (q, k, v))
    return rearrange(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), "b n s d -> b s (n d)")


def joint_mask(frames: int, per_frame: int, actions: int) -> Tensor:
    """Dense first-frame-causal mask over [video, actions]; True may attend."""
    video = frames * per_frame
    mask = torch.zeros(video + actions, video + actions, dtype=torch.bool)
    mask[:video, :video] = True
    mask[:per_frame, per_frame:video] = False
    mask[:video, video:] = True
    mask[video:, video:] = True
    return mask


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class Stream:
    """One expert's tokens on their way through the blocks."""

    def __init__(self, expert: Expert, x: Tensor, modulation: Tensor, context: Tensor, mask: Tensor, table: Tensor):
        self.expert, self.x, self.modulation = expert, x, modulation
        self.context, self.mask, self.table = context, mask, table

    def chunks(self, block: Block) -> tuple[Tensor, ...]:
        table = block.scale_shift_table
        if self.modulation.ndim == 4:  # one for every token
            return tuple(c.squeeze(2) for c in (table.unsqueeze(1) + self.modulation).chunk(6, dim=2))
        return (table + self.modulation).chunk(6, dim=1)

    def normed(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], eps=self.expert.config.eps)

    def before(self, block: Block) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Queries, keys and values of the joint attention."""
        parts = self.chunks(block)
        y, attn = modulate(self.normed(self.x), parts[0], parts[1]), block.attn1
        q = rotate(attn.norm_q(attn.to_q(y)), self.table, attn.heads)
        k = rotate(attn.norm_k(attn.to_k(y)), self.table, attn.heads)
        return q, k, attn.to_v(y), parts

    def after(self, block: Block, heads: Tensor, parts: tuple[Tensor, ...], sim: Tensor | None) -> None:
        """What follows the joint attention."""
        x = self.x + parts[2] * block.attn1.to_out[0](heads)
        cross: Attention = block.attn2
        q = cross.norm_q(cross.to_q(block.norm2(x)))
        k = cross.norm_k(cross.to_k(self.context))
        x = x + cross.to_out[0](attention(q, k, cross.to_v(self.context), cross.heads, self.mask.unsqueeze(1)))
        if sim is not None:
            x = x + sim
        hidden = block.ffn.net[0].proj(modulate(self.normed(x), parts[3], parts[4]))
        self.x = x + parts[5] * block.ffn.net[2](functional.gelu(hidden, approximate="tanh"))


def embed_time(expert: Expert, timestep: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Time embedding and its projection, one row a time."""
    embedder = expert.condition_embedder
    mlp = embedder.time_embedder
    t = mlp.linear_2(functional.silu(mlp.linear_1(sinusoid(timestep, embedder.freq_dim).to(dtype))))
    return t, embedder.time_proj(functional.silu(t)).unflatten(1, (6, -1))


def embed_text(expert: Expert, context: Tensor) -> Tensor:
    mlp = expert.condition_embedder.text_embedder
    result: Tensor = mlp.linear_2(functional.gelu(mlp.linear_1(context), approximate="tanh"))
    return result


class Plain:
    """The forward of a `WorldModel` with index action positions, as released."""

    def __init__(self, model: WorldModel) -> None:
        self.model = model
        d = model.config.video.head_dim
        side = d // 3
        self.tables = (turns(1024, d - 2 * side), turns(1024, side), turns(1024, side))
        self.action_table = turns(1024, d)

    def velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        action: Tensor,
        context: Tensor,
        context_mask: Tensor,
        sim: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Velocity [B, C, F, H, W]; frame 0 is clean and has time 0."""
        video, expert = self.model.video, self.model.action
        dtype = latents.dtype
        tokens = video.patch_embedding(latents)
        f, h, w = tokens.shape[2:]
        x = rearrange(tokens, "b d f h w -> b (f h w) d")
        batch, count = x.shape[:2]
        times = timestep.to(dtype)[:, None].repeat(1, count)
        times[:, : h * w] = 0
        t, modulation = embed_time(video, times.flatten(), dtype)
        t, modulation = t.unflatten(0, (batch, count)), modulation.unflatten(0, (batch, count))
        a = expert.action_encoder(action)
        _, action_modulation = embed_time(expert, torch.zeros(batch, dtype=dtype), dtype)
        streams = [
            Stream(
                video,
                x,
                modulation,
                embed_text(video, context),
                context_mask[:, None].expand(batch, count, -1),
                video_table(self.tables, f, h, w),
            ),
            Stream(
                expert,
                a,
                action_modulation,
                embed_text(expert, context),
                context_mask[:, None].expand(batch, a.shape[1], -1),
                self.action_table[: a.shape[1], None],
            ),
        ]
        mask = joint_mask(f, h * w, a.shape[1])
        for i in range(len(video.layers)):
            self._block(i, streams, mask, sim, gate)
        return self._head(video, streams[0].x, t, (f, h, w))

    def _block(self, i: int, streams: list[Stream], mask: Tensor, sim: Tensor | None, gate: Tensor | None) -> None:
        blocks = [stream.expert.layers[i] for stream in streams]
        parts = [stream.before(block) for stream, block in zip(streams, blocks, strict=True)]
        q, k, v = (torch.cat([part[j] for part in parts], dim=1) for j in range(3))
        heads = attention(q, k, v, blocks[0].attn1.heads, mask).split([s.x.shape[1] for s in streams], dim=1)
        residual = None
        if sim is not None and self.model.sim is not None:
            residual = rearrange(self.model.sim.layers[i](sim.detach()), "b d f h w -> b (f h w) d")
            if gate is not None:
                residual = residual * gate.to(residual.dtype).view(-1, 1, 1)
        for stream, block, out, part, extra in zip(streams, blocks, heads, parts, (residual, None), strict=True):
            stream.after(block, out, part[3], extra)

    @staticmethod
    def _head(video: VideoExpert, x: Tensor, t: Tensor, grid: tuple[int, int, int]) -> Tensor:
        shift, scale = (video.scale_shift_table.unsqueeze(0) + t.unsqueeze(2)).chunk(2, dim=2)
        y = functional.layer_norm(x, x.shape[-1:], eps=video.config.eps)
        y = video.proj_out(y * (1 + scale.squeeze(2)) + shift.squeeze(2))
        f, h, w = grid
        pt, ph, pw = video.patch
        return rearrange(
            y, "b (f h w) (t p q c) -> b c (f t) (h p) (w q)", f=f, h=h, w=w, t=pt, p=ph, q=pw
        )  # fmt: skip


@dataclass
class Spent:
    """Seconds of a rollout's forwards: of the simulation stage, and of the two branches of the real stage."""

    sim: float = 0.0
    on: float = 0.0
    off: float = 0.0


@torch.no_grad()
def rollout(plain: Plain, start: "Start", stages: tuple[Steps, Steps], w: float, spent: Spent | None = None) -> Tensor:
    """Both stages of one clip, in the latents' dtype; conditioned and unconditioned forward in turn, whatever w is."""
    spent = spent or Spent()
    noise, dtype = start.noise, start.noise.dtype
    context, mask = plain.model.context(start.text, start.text_mask, start.proprio)

    def forward(kind: str, x: Tensor, t: Tensor, *sim: Tensor) -> Tensor:
        began = time.perf_counter()
        velocity = plain.velocity(x, t.to(dtype).expand(1), start.action, context, mask, *sim)
        setattr(spent, kind, getattr(spent, kind) + time.perf_counter() - began)
        return velocity

    sim = noise.clone()
    sim[:, :, :1] = start.first_sim
    for t, delta in zip(*stages[0], strict=True):
        sim = sim + forward("sim", sim, t) * delta.to(dtype)
        sim[:, :, :1] = start.first_sim
    x = noise.clone()
    x[:, :, :1] = start.first_real
    on, off = torch.ones(1), torch.zeros(1)
    for t, delta in zip(*stages[1], strict=True):
        v_on, v_off = forward("on", x, t, sim, on), forward("off", x, t, sim, off)
        x = x + (v_off + w * (v_on - v_off)) * delta.to(dtype)
        x[:, :, :1] = start.first_real
    return x


def student_step(
    student: Plain, teacher: Plain, batch: Batch, draws: Draws, config: ObjectiveConfig
) -> dict[str, Tensor]:
    """Loss terms and gradients of one training step: teacher, simulated branch, real branch, one after the other."""
    model, flow = student.model, student.model.flow
    assert batch.sim_latents is not None
    context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
    sigma, weight = draws.timestep / flow.train_steps, flow.weight(draws.timestep)
    x_real, x_syn = (noisy(z, draws, flow.train_steps) for z in (batch.latents, batch.sim_latents))
    given = (draws.timestep, batch.action, context, mask)
    with torch.no_grad():
        target = estimate(x_syn, teacher.velocity(x_syn, *given), sigma, None).diff(dim=2)
    shape = (-1, 1, 1, 1, 1)
    sim = draws.keep.view(shape) * batch.sim_latents + draws.spread.view(shape) * draws.corruption
    velocities = {"syn": student.velocity(x_syn, *given), "real": student.velocity(x_real, *given, sim, draws.gate)}
    terms = {}
    for name, x, clean in (("real", x_real, batch.latents), ("syn", x_syn, batch.sim_latents)):
        error = (velocities[name] - (draws.noise - clean)).square().mean(dim=(1, 3, 4))[:, 1:].mean(1)
        moved = (estimate(x, velocities[name], sigma, None).diff(dim=2) - target).square().flatten(1).mean(1)
        terms |= {f"flow_{name}": (weight * error).mean(), f"motion_{name}": (weight * moved).mean()}
    flow_loss = 0.5 * (config.real_weight * terms["flow_real"] + config.syn_weight * terms["flow_syn"])
    motion = 0.5 * (config.real_weight * terms["motion_real"] + config.syn_weight * terms["motion_syn"])
    terms["total"] = config.video_weight * flow_loss + config.motion_weight * motion
    terms["total"].backward()
    return terms
