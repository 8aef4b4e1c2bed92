"""Bytes of activations, from the block arithmetic of `model/experts.py` and `model/mixture.py`: computed, not measured.

Legend: S video tokens a clip (`frame` of them a latent frame), A action steps, L context tokens, D width, I = heads x
head width, G ffn width, h heads, X text width.
"""

import math
from dataclasses import dataclass

from simforcing.model.codec import Codec
from simforcing.model.experts import ExpertConfig
from simforcing.train.recipe import Recipe

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Shapes:
    """What the blocks compute on, for one clip."""

    frames: int  # latent frames
    frame: int  # tokens a latent frame
    actions: int
    context: int  # tokens of text, and one of proprioception
    latent: int  # numbers of its latents

    @classmethod
    def of(cls, recipe: Recipe, codec: Codec, patch: tuple[int, int, int] = (1, 2, 2)) -> "Shapes":
        """The shapes that a recipe's clip rule, codec and text length lead to.

        Raises:
            SimForcingError: the clip rule does not suit the codec.
        """
        rule = recipe.rule
        shape = codec.latent_shape(rule.frames, rule.height, rule.width)
        frames, height, width = (n // p for n, p in zip(shape[1:], patch, strict=True))
        words = recipe.text_length if recipe.text_pooling == "tokens" else 1
        return cls(frames, height * width, rule.actions, words + 1, math.prod(shape))

    @property
    def tokens(self) -> int:
        """Video tokens."""
        return self.frames * self.frame


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are kept for backward.

    item: bytes a number. written_out: attention and RMS norm as separate operations, as on a CPU, which keep their
    probabilities and normalised inputs; otherwise fused kernels, which keep inputs, outputs and a statistic a row.
    """

    item: int = 2
    written_out: bool = False

    def norms(self, tokens: int, layers: int, rms: int, width: int) -> int:
        """Bytes of what `layers` layer norms (mean and deviation) and `rms` RMS norms keep besides their inputs."""
        return tokens * ((2 * layers + rms) * FLOAT + (rms * width * self.item if self.written_out else 0))

    def attention(self, heads: int, queries: int, keys: int) -> int:
        """Bytes of what softmax(q k^T) v keeps besides q, k, v and its result."""
        return heads * queries * (keys * self.item if self.written_out else FLOAT)


def video_block(config: ExpertConfig, shapes: Shapes, arithmetic: Arithmetic) -> int:
    """Bytes that a video block keeps for its backward, one clip. In numbers a token:

    - width D, ten times. Self-attention: its input, that normalised, that modulated, and its result, which the gate
      multiplies. Cross-attention: its input and that normalised. Feed-forward: as self-attention.
    - width I, eight times. Self-attention: queries and keys before their norm, queries rotated, heads, and the
      heads of first and later frames joined. Cross-attention: queries before and after their norm, heads.
    - keys and values of self-attention, width I, for video and action tokens: joined, so the block has its own copy.
    - width G, twice: before and after the GELU.
    - per latent frame eight vectors of D: six modulations and 1 + scale, twice.
    - statistics of three layer norms and three RMS norms, and of the two softmaxes.

    Written out, the joined heads are not kept twice, and the first frame's shorter keys are a copy.
    """
    s, inner = shapes.tokens, config.attention_dim
    keys = s + shapes.actions
    numbers = s * (10 * config.dim + 8 * inner + 2 * config.ffn_dim) + 2 * keys * inner
    numbers += 8 * shapes.frames * config.dim
    first = shapes.frame + shapes.actions
    kept = numbers * arithmetic.item + arithmetic.norms(s, 3, 3, inner)
    kept += arithmetic.attention(config.num_heads, shapes.frame, first)
    kept += arithmetic.attention(config.num_heads, s - shapes.frame, keys)
    kept += arithmetic.attention(config.num_heads, s, shapes.context)
    return kept + ((first - s) * inner * arithmetic.item if arithmetic.written_out else 0)


def action_block(config: ExpertConfig, shapes: Shapes, arithmetic: Arithmetic, last: bool = False) -> int:
    """Bytes that an action block keeps for its backward, one clip: as `video_block`, keys and values not copied.

    Of the last block only keys and values are computed: its input, that normalised and modulated, and its keys before
    their norm.
    """
    a, inner = shapes.actions, config.attention_dim
    if last:
        return a * (3 * config.dim + inner) * arithmetic.item + arithmetic.norms(a, 1, 1, inner)
    numbers = a * (10 * config.dim + 9 * inner + 2 * config.ffn_dim) + 8 * config.dim
    kept = numbers * arithmetic.item + arithmetic.norms(a, 3, 3, inner)
    return (
        kept + arithmetic.attention(config.num_heads, a, a) + arithmetic.attention(config.num_heads, a, shapes.context)
    )


def context_saved(config: ExpertConfig, shapes: Shapes, arithmetic: Arithmetic) -> int:
    """Bytes that a context kept for backward takes, one clip: its embedding (its input X wide; before and after the
    GELU, and the result), and in each block its keys before and after their norm and its values.
    """
    n, inner = shapes.context, config.attention_dim
    numbers = n * (config.text_dim + 3 * config.dim + config.num_layers * 3 * inner)
    return numbers * arithmetic.item + config.num_layers * arithmetic.norms(n, 0, 1, inner)


def ends_saved(config: ExpertConfig, shapes: Shapes, arithmetic: Arithmetic) -> int:
    """Bytes of both ends of the video expert, one clip: patches in, and in the head its input, that normalised and
    modulated; and of the loss, about eight latents in float32 (velocity, target, their differences and squares).
    """
    return 3 * shapes.tokens * config.dim * arithmetic.item + 9 * shapes.latent * FLOAT


def activations(
    recipe: Recipe, shapes: Shapes, arithmetic: Arithmetic, clips: int, checkpointing: bool, sim_clips: int = 0
) -> int:
    """Bytes that are alive when the backward pass of a step begins, `clips` clips through both experts.

    With checkpointing a block keeps its input only; one block at a time is computed again and then needs what it
    would have kept. What a step computes once (keys and values of the context, simulation residuals of every block for
    `sim_clips` clips) stays in both cases.
    """
    video, action = recipe.video, recipe.action
    block = video_block(video, shapes, arithmetic)
    blocks = [action_block(action, shapes, arithmetic, i + 1 == action.num_layers) for i in range(action.num_layers)]
    if checkpointing:
        width = shapes.tokens * video.dim + shapes.actions * (action.dim + 2 * action.attention_dim)
        kept = video.num_layers * width * arithmetic.item + block
    else:
        kept = video.num_layers * block + sum(blocks)
    kept += context_saved(video, shapes, arithmetic) + context_saved(action, shapes, arithmetic)
    kept += ends_saved(video, shapes, arithmetic)
    return clips * kept + sim_clips * sim_residuals(video, shapes, arithmetic)


def sim_residuals(config: ExpertConfig, shapes: Shapes, arithmetic: Arithmetic) -> int:
    """Bytes of what simulation adds in all blocks, one clip."""
    return config.num_layers * shapes.tokens * config.dim * arithmetic.item


def backward_work(recipe: Recipe, shapes: Shapes, arithmetic: Arithmetic, clips: int) -> int:
    """Bytes of gradients of activations that are alive inside one block's backward: two of width G, four of width D."""
    return clips * shapes.tokens * (2 * recipe.video.ffn_dim + 4 * recipe.video.dim) * arithmetic.item


def forward_work(recipe: Recipe, shapes: Shapes, arithmetic: Arithmetic, clips: int) -> int:
    """Bytes alive at once in a forward without gradients, an upper estimate, besides weights and simulation residuals.

    Keys and values in every block: of the context for both experts, of actions and of the first frame; latents in
    float32, four times; and in a block, a token, four tensors of width D, three of width I (heads, keys, values) and,
    whichever is more, width G before and after the GELU, or width I in float32 before and after its rotation.
    """
    video, inner = recipe.video, recipe.video.attention_dim
    once = video.num_layers * 2 * (2 * shapes.context + shapes.actions + shapes.frame) * inner
    block = shapes.tokens * (4 * video.dim + 3 * inner) * arithmetic.item
    block += 2 * shapes.tokens * max(video.ffn_dim * arithmetic.item, inner * FLOAT)
    return clips * (once * arithmetic.item + block + 4 * shapes.latent * FLOAT)
