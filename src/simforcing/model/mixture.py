"""The joint forward of both experts.

Legend: B batch, C channels, F latent frames, H W latent grid, S video tokens (`hw` a frame), A action steps, D width,
h heads, d head width, L context tokens, X text width.

Who sees whom (first-frame-causal): video frame 0 sees itself and all actions; later frames see all video and all
actions; actions see actions. Two things follow, and both are used. The action expert does not depend on the video or
on the noise level: only its keys and values are needed, once a rollout. And no dense mask is needed: with keys in the
order [actions, frame 0, later frames], frame 0 attends to a prefix and later frames to everything.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from simforcing.model.experts import (
    ActionExpert,
    Attention,
    KeysValues,
    VideoExpert,
    attend,
    modulated,
    video_rope,
)


@dataclass(frozen=True)
class Condition:
    """All that a denoising step needs and that no step changes; computed once a rollout, or once a training step."""

    text: list[KeysValues]
    text_mask: Bool[Tensor, "B 1 1 L"] | None
    action: list[KeysValues] | None  # None: no action expert at all
    sim: list[Float[Tensor, "B S D"]] | None  # None: not conditioned on simulation

    def repeat(self, n: int) -> "Condition":
        """The same text and actions for n batches after one another (simulation left out: it differs between them)."""

        def tiled(pairs: list[KeysValues]) -> list[KeysValues]:
            return [(k.repeat(n, 1, 1, 1), v.repeat(n, 1, 1, 1)) for k, v in pairs]

        mask = None if self.text_mask is None else self.text_mask.repeat(n, 1, 1, 1)
        return Condition(tiled(self.text), mask, None if self.action is None else tiled(self.action), None)


def action_keys_values(
    expert: ActionExpert,
    action: Float[Tensor, "B A a"],
    context: Float[Tensor, "B L X"],
    mask: Bool[Tensor, "B 1 1 L"] | None,
    rope: Tensor,
) -> list[KeysValues]:
    """Keys and values of every action block. Actions are clean: their time is 0."""
    x = expert.action_encoder(action)
    text = expert.text_keys_values(context)
    zero = torch.zeros(x.shape[0], 1, device=x.device)
    _, time = expert.condition_embedder.time(zero)
    result: list[KeysValues] = []
    for i, block in enumerate(expert.layers):
        shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = (m.squeeze(1) for m in block.modulation(time))
        normed = modulated(x, shift, scale, block.eps)
        result.append(block.attn1.keys_values(normed, rope))
        if i + 1 == len(expert.blocks):
            return result
        heads = attend(block.attn1.query(normed, rope), *result[-1])
        x = torch.addcmul(x, gate, block.attn1.out(heads))
        x = block.cross(x, text[i], mask)
        x = torch.addcmul(x, gate_ffn, block.ffn(modulated(x, shift_ffn, scale_ffn, block.eps)))
    return result


def denoise(
    expert: VideoExpert,
    latents: Float[Tensor, "B C F H W"],
    timestep: Float32[Tensor, "B F"],
    condition: Condition,
) -> Float[Tensor, "B C F H W"]:
    """Velocity of every latent frame; each frame is embedded with the time that it is given."""
    frames, height, width = (n // p for n, p in zip(latents.shape[2:], expert.patch, strict=True))
    rope = video_rope(frames, height, width, expert.config.head_dim).to(latents.device)
    embedding, time = expert.condition_embedder.time(timestep)
    x = expert.embed(latents).unflatten(1, (frames, -1))  # B F hw D: modulations are one a frame
    for i, block in enumerate(expert.layers):
        shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = block.modulation(time)
        action = None if condition.action is None else condition.action[i]
        normed = modulated(x, shift, scale, block.eps).flatten(1, 2)
        attended = _first_frame_causal(block.attn1, normed, rope, action, height * width)
        x = torch.addcmul(x, gate, attended.view_as(x))
        tokens = block.cross(x.flatten(1, 2), condition.text[i], condition.text_mask)
        if condition.sim is not None:
            tokens = tokens + condition.sim[i]
        x = tokens.view_as(x)
        x = torch.addcmul(x, gate_ffn, block.ffn(modulated(x, shift_ffn, scale_ffn, block.eps)))
    return expert.unembed(x, embedding, (height, width))


def _first_frame_causal(
    layer: Attention, x: Float[Tensor, "B S D"], rope: Tensor, action: KeysValues | None, first: int
) -> Float[Tensor, "B S D"]:
    """Self-attention of video tokens over [actions, video]; the first frame's queries stop after their own frame."""
    query = layer.query(x, rope)
    keys, values = layer.keys_values(x, rope)
    if action is not None:
        keys, values = (torch.cat(pair, dim=2) for pair in zip(action, (keys, values), strict=True))
    seen = keys.shape[2] - x.shape[1] + first
    heads = attend(query[:, :, :first], keys[:, :, :seen], values[:, :, :seen])
    if x.shape[1] > first:
        heads = torch.cat([heads, attend(query[:, :, first:], keys, values)], dim=2)
    return layer.out(heads)
