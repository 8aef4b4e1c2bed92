"""The joint forward of both experts, in one piece for training and in cached parts for rollouts.

Legend: B batch, C channels, F latent frames, H W latent grid, S video tokens (`hw` a frame), A action steps, D width,
h heads, d head width, L context tokens, X text width, G groups of tokens that share a time.

Who sees whom (first-frame-causal): video frame 0 sees itself and all actions; later frames see all video and all
actions; actions see actions. Three things follow, and all are used:

- The action expert depends on neither the video nor the noise level: its keys and values are computed once.
- Frame 0 is clean, has time 0 and does not see later frames: in a rollout its keys and values are computed once, too
  (`remember_first`), and the denoising steps are left with the later frames, which see everything.
  (In a bidirectional model, as Wan2.2 was trained, it sees them, and only the actions are computed once.)
- No dense mask is needed. With keys in the order [actions, frame 0, later frames], frame 0 attends to a prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Complex64, Float, Float32
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model.experts import ActionExpert, Block, KeysValues, VideoExpert, attend, modulated
from simforcing.model.sim_condition import SimResiduals


@dataclass(frozen=True)
class Condition:
    """All that a denoising step needs and that no step changes; computed once a rollout, or once a training step."""

    rope: Complex64[Tensor, "S half_d"]  # of the video tokens that a step computes
    text: list[KeysValues]
    text_mask: Bool[Tensor, "B 1 1 L"] | None
    before: list[KeysValues] | None  # what video tokens see besides themselves; None: no action expert at all
    sim: SimResiduals | None  # None: not conditioned on simulation
    first_frame_causal: bool = True  # False: bidirectional, the first frame sees the later ones
    knows_first: bool = False  # `before` holds the first frame; a step is given the later ones only
    split: int = 1  # branches that are one until the first residual; from block 1 on, there are as many times the rows

    @property
    def rows(self) -> int:
        """Samples that a step returns."""
        return len(self.text[0][0]) * self.split

    def take(self, rows: Tensor) -> "Condition":
        """Text and actions of some samples, in this order; simulation left out."""

        def taken(pairs: list[KeysValues]) -> list[KeysValues]:
            return [(k[rows], v[rows]) for k, v in pairs]

        mask = None if self.text_mask is None else self.text_mask[rows]
        before = None if self.before is None else taken(self.before)
        return replace(self, text=taken(self.text), text_mask=mask, before=before, sim=None)


def stacked(branches: Sequence[Condition], sim: SimResiduals | None) -> Condition:
    """Guidance branches over the same clips as one batch, one branch's samples after the other's.

    Branches that differ in simulation alone (given as the same object) part at the first residual: until then, in the
    attentions of block 0, they are computed once.
    """
    one = branches[0]
    if len(branches) == 1:
        return replace(one, sim=sim)
    same = sim is not None and all(branch is one for branch in branches)

    def joined(lists: list[list[KeysValues]]) -> list[KeysValues]:
        pairs = [
            (torch.cat([k for k, _ in block]), torch.cat([v for _, v in block])) for block in zip(*lists, strict=True)
        ]
        return [lists[0][0], *pairs[1:]] if same else pairs

    mask = None if one.text_mask is None else torch.cat([b.text_mask for b in branches if b.text_mask is not None])
    before = None if one.before is None else joined([b.before for b in branches if b.before is not None])
    text = joined([b.text for b in branches])
    return replace(one, text=text, text_mask=mask, before=before, sim=sim, split=len(branches) if same else 1)


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
    _, time = expert.condition_embedder.time(x.new_zeros(1, 1, dtype=torch.float32))
    result: list[KeysValues] = []
    for i, block in enumerate(expert.layers):
        x, seen = block.run(action_block, x, time, text[i], mask, rope, None, i + 1 == len(expert.blocks))
        result.append(seen)
    return result


def action_block(
    block: Block,
    x: Float[Tensor, "B A D"],
    time: Float[Tensor, "B 1 6 D"],
    text: KeysValues,
    mask: Bool[Tensor, "B 1 1 L"] | None,
    rope: Tensor,
    before: KeysValues | None,
    last: bool,
) -> tuple[Float[Tensor, "B A D"], KeysValues]:
    """Tokens of actions after one block, and all keys and values that they see; `last`: nothing else is needed of it.

    before: what they see besides themselves; a world model's actions see nothing else, a policy's see video.
    """
    *attention, shift, scale, gate = (m.squeeze(1) for m in block.modulation(time))
    normed = modulated(x, attention[0], attention[1], block.eps)
    seen = _joined(before, block.attn1.keys_values(normed, rope))
    if last:
        return x, seen
    heads = attend(block.attn1.query(normed, rope), *seen)
    x = torch.addcmul(x, attention[2], block.attn1.out(heads))
    x = block.cross(x, text, mask)
    return torch.addcmul(x, gate, block.ffn(modulated(x, shift, scale, block.eps))), seen


def remember_first(expert: VideoExpert, first: Float[Tensor, "B C 1 H W"], condition: Condition) -> Condition:
    """The condition of a rollout whose first latent frame is given: its keys and values join those of the actions.

    Raises:
        SimForcingError: attention is bidirectional, so what the first frame holds changes in every step.
    """
    if not condition.first_frame_causal:
        raise SimForcingError("the first frame of a bidirectional model sees the later ones; give `denoise` all frames")
    x = _tiled(expert.embed(first), len(condition.text[0][0])).unsqueeze(1)
    tokens = x.shape[2]
    early = replace(
        condition,
        rope=condition.rope[:tokens],
        sim=None if condition.sim is None else condition.sim.tokens(slice(tokens)),
    )
    _, time = expert.condition_embedder.time(x.new_zeros(1, 1, dtype=torch.float32))
    before: list[KeysValues] = []
    for i, block in enumerate(expert.layers):
        x, seen = block.run(_watched_block, x, time, early, i, 0, i + 1 == len(expert.blocks))
        before.append(seen)
    sim = None if condition.sim is None else condition.sim.tokens(slice(tokens, None))
    return replace(condition, rope=condition.rope[tokens:], before=before, sim=sim, knows_first=True)


def denoise(
    expert: VideoExpert,
    latents: Float[Tensor, "B C F H W"],
    timestep: Float32[Tensor, "B n"],
    condition: Condition,
) -> Float[Tensor, "rows C F H W"]:
    """Velocity of the latent frames given: all of them, or those after the first if the condition knows that one.

    timestep: n = 1, one time for all frames; n = 2, the first frame's and the others'. One row serves all samples.
    `rows` is B times the number of branches of the condition.
    """
    grid, first = _grid(expert, latents, condition)
    embedding, time, x = _embedded(expert, latents, timestep, condition)
    for i, block in enumerate(expert.layers):
        x = block.run(_video_block, x, time, condition, i, first)
    return expert.unembed(x, embedding, grid)


def watch(
    expert: VideoExpert,
    latents: Float[Tensor, "B C F H W"],
    timestep: Float32[Tensor, "B n"],
    condition: Condition,
    predict: bool = True,
) -> tuple[Float[Tensor, "rows C F H W"] | None, list[KeysValues]]:
    """As `denoise`, with the keys and values of every block that a later frame sees: what a policy's actions see.

    predict: False leaves out the velocity, and with it what follows the last block's keys and values.
    """
    grid, first = _grid(expert, latents, condition)
    embedding, time, x = _embedded(expert, latents, timestep, condition)
    found: list[KeysValues] = []
    for i, block in enumerate(expert.layers):
        last = not predict and i + 1 == len(expert.blocks)
        x, seen = block.run(_watched_block, x, time, condition, i, first, last)
        found.append(seen)
    return expert.unembed(x, embedding, grid) if predict else None, found


def _grid(expert: VideoExpert, latents: Tensor, condition: Condition) -> tuple[tuple[int, int, int], int]:
    """Patches along frames, height and width, and how many tokens are of a first frame that sees no later one."""
    frames, height, width = (n // p for n, p in zip(latents.shape[2:], expert.patch, strict=True))
    first = height * width if condition.first_frame_causal and not condition.knows_first else 0
    return (frames, height, width), first


def _embedded(
    expert: VideoExpert, latents: Tensor, timestep: Tensor, condition: Condition
) -> tuple[Float[Tensor, "B G D"], Float[Tensor, "B G 6 D"], Float[Tensor, "B G n D"]]:
    """Time embedding and its modulation, a group of tokens each, and the tokens."""
    embedding, time = expert.condition_embedder.time(timestep)
    frames = latents.shape[2] // expert.patch[0]
    x = _tiled(expert.embed(latents), len(condition.text[0][0]))
    x = x.unflatten(1, (frames, -1)) if timestep.shape[1] == 2 else x.unsqueeze(1)
    return _a_frame(embedding, frames), _a_frame(time, frames), x


def _video_block(
    block: Block, x: Float[Tensor, "B G n D"], time: Float[Tensor, "B G 6 D"], condition: Condition, i: int, first: int
) -> Float[Tensor, "rows G n D"]:
    """Tokens after block i; `first` of them are the first frame's and see no later ones."""
    return _watched_block(block, x, time, condition, i, first, False)[0]


def _watched_block(
    block: Block,
    x: Float[Tensor, "B G n D"],
    time: Float[Tensor, "B G 6 D"],
    condition: Condition,
    i: int,
    first: int,
    last: bool,
) -> tuple[Float[Tensor, "rows G n D"], KeysValues]:
    """As `_video_block`, with all keys and values that later tokens see in it; `last`: nothing else is needed of it."""
    parts = block.modulation(time)
    normed, seen = _enter(block, x, parts, condition, i)
    if last:
        return x, seen
    heads = _first_frame_causal(block.attn1.query(normed, condition.rope), seen, first)
    return _leave(block, x, parts, heads, condition, i), seen


def _tiled(x: Float[Tensor, "B S D"], rows: int) -> Float[Tensor, "rows S D"]:
    """One copy after another until there are `rows`."""
    return x if len(x) == rows else x.repeat(rows // len(x), 1, 1)


def _a_frame(times: Float[Tensor, "B n *rest"], frames: int) -> Tensor:
    """Of (first, others): one row a frame."""
    if times.shape[1] == 1:
        return times
    return torch.cat([times[:, :1], times[:, 1:].expand(-1, frames - 1, *times.shape[2:])], dim=1)


def _enter(
    block: Block, x: Float[Tensor, "B G n D"], parts: tuple[Tensor, ...], condition: Condition, i: int
) -> tuple[Float[Tensor, "B S D"], KeysValues]:
    """Normed tokens of block i, and the keys and values that they may see: what came before, then their own."""
    normed = modulated(x, parts[0], parts[1], block.eps).flatten(1, 2)
    before = None if condition.before is None else condition.before[i]
    return normed, _joined(before, block.attn1.keys_values(normed, condition.rope))


def _joined(before: KeysValues | None, own: KeysValues) -> KeysValues:
    """What came before, then their own."""
    if before is None:
        return own
    return torch.cat([before[0], own[0]], dim=2), torch.cat([before[1], own[1]], dim=2)


def _first_frame_causal(query: Float[Tensor, "B h S d"], seen: KeysValues, first: int) -> Float[Tensor, "B h S d"]:
    """Attention in which the first `first` queries stop after their own frame."""
    keys, values = seen
    if first == 0 or query.shape[2] == first:
        return attend(query, keys, values)
    prefix = keys.shape[2] - query.shape[2] + first
    early = attend(query[:, :, :first], keys[:, :, :prefix], values[:, :, :prefix])
    return torch.cat([early, attend(query[:, :, first:], keys, values)], dim=2)


def _leave(
    block: Block,
    x: Float[Tensor, "B G n D"],
    parts: tuple[Tensor, ...],
    heads: Float[Tensor, "B h S d"],
    condition: Condition,
    i: int,
) -> Float[Tensor, "rows G n D"]:
    """What follows the joint attention of block i: its gate, text, simulation, feed-forward net."""
    x = torch.addcmul(x, parts[2], block.attn1.out(heads).view_as(x))
    mask = None if condition.text_mask is None else condition.text_mask[: len(x)]  # branches share their text
    tokens = block.cross(x.flatten(1, 2), condition.text[i], mask)
    if condition.sim is not None:
        tokens = condition.sim.add(_tiled(tokens, condition.rows), i)
    x = tokens.unflatten(1, x.shape[1:3])
    return torch.addcmul(x, parts[5], block.ffn(modulated(x, parts[3], parts[4], block.eps)))
