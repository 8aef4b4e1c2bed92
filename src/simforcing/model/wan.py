"""Wan2.2's video transformer, as diffusers and as its authors lay it out.

Our video expert has diffusers' parameter names; here are the original ones, which the authors of SimForcing use too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.model.weights import Weights, number, read_json, read_shards, shards

STEM = "diffusion_pytorch_model"
HEADS, HEAD_DIM = 24, 128
"""The paper's split of the attention width, which no tensor's shape tells."""

# (original, ours), of the transformer and of one of its blocks; longer names are made of these and a suffix.
_TOP: tuple[tuple[str, str], ...] = (
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("head.head", "proj_out"),
    ("head.modulation", "scale_shift_table"),
)
_ATTENTION = (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"), ("norm_q",) * 2, ("norm_k",) * 2)
_BLOCK: tuple[tuple[str, str], ...] = (
    ("modulation", "scale_shift_table"),
    *((f"self_attn.{a}", f"attn1.{b}") for a, b in _ATTENTION),
    *((f"cross_attn.{a}", f"attn2.{b}") for a, b in _ATTENTION),
    ("norm3", "norm2"),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
)


def original_name(ours: str) -> str:
    """The original name of an expert's parameter (`blocks.0.attn1.to_q.weight` -> `blocks.0.self_attn.q.weight`)."""
    return _renamed(ours, 1, 0)


def our_name(original: str) -> str:
    """Inverse of `original_name`."""
    return _renamed(original, 0, 1)


def _renamed(name: str, source: int, target: int) -> str:
    head, table, rest = "", _TOP, name
    if name.startswith("blocks."):
        _, index, rest = (*name.split(".", 2), "")[:3]
        head, table = f"blocks.{index}.", _BLOCK
    for pair in table:
        if rest == pair[source] or rest.startswith(pair[source] + "."):
            return head + pair[target] + rest[len(pair[source]) :]
    return name


def split_heads(width: int, heads: int | None, where: str) -> tuple[int, int]:
    """Number of heads and their width, of an attention width that is split in `heads` (None: as in the paper).

    Raises:
        SimForcingError: the width is not the paper's and `heads` is not given, or it does not divide evenly.
    """
    if heads is None:
        if width != HEADS * HEAD_DIM:
            raise SimForcingError(
                f"{where}: the attention width {width} is not the paper's {HEADS} heads x {HEAD_DIM}, and shapes "
                "do not tell how it is split; give --heads"
            )
        heads = HEADS
    if heads < 1 or width % heads or (width // heads) % 2:
        raise SimForcingError(
            f"{where}: the attention width {width} does not divide into {heads} heads of an even width; "
            "give another --heads"
        )
    return heads, width // heads


def expert_config(weights: Weights, expert: str, blocks: str, heads: int | None, eps: float) -> ExpertConfig:
    """Sizes of an expert (`video`, `action`) from its tensors; `blocks`: what the file puts before a block's number."""
    first = f"{expert}.blocks.0"
    split = split_heads(weights.shape(f"{first}.attn1.to_q.weight", 2)[0], heads, weights.where)
    return ExpertConfig(
        dim=weights.shape(f"{first}.scale_shift_table", 3)[2],
        ffn_dim=weights.shape(f"{first}.ffn.net.0.proj.weight", 2)[0],
        num_layers=weights.count(blocks),
        num_heads=split[0],
        head_dim=split[1],
        text_dim=weights.shape(f"{expert}.condition_embedder.text_embedder.linear_1.weight", 2)[1],
        freq_dim=weights.shape(f"{expert}.condition_embedder.time_embedder.linear_1.weight", 2)[1],
        eps=eps,
    )


@dataclass(frozen=True)
class WanTransformer:
    """A video transformer in a directory: `config.json` and tensors, of either layout."""

    directory: Path
    layout: Literal["diffusers", "original"]

    @property
    def name(self) -> Callable[[str], str]:
        """From our names (`video.*`) to the files'."""
        if self.layout == "diffusers":
            return lambda ours: ours.removeprefix("video.")
        return lambda ours: original_name(ours.removeprefix("video."))

    def read(self) -> tuple[ExpertConfig, int, tuple[int, int, int], Weights]:
        """Sizes as `config.json` says, latent channels, patch, and tensors.

        Raises:
            SimForcingError: a size is missing in `config.json`, or it is not a text-to-video transformer's.
        """
        where = self.directory / "config.json"
        config = read_json(where)
        weights = Weights(read_shards(self.directory, STEM), self.name, str(self.directory))
        expert, channels, out = self._sizes(config, where, weights)
        if channels != out:
            raise SimForcingError(f"{where}: {channels} channels in and {out} out; as many out as in are needed")
        kernel = weights.shape("video.patch_embedding.weight", 5)[2:]
        t, p, q = config.get("patch_size") or kernel
        return expert, channels, (int(t), int(p), int(q)), weights

    def _sizes(self, config: Mapping[str, Any], where: Path, weights: Weights) -> tuple[ExpertConfig, int, int]:
        diffusers = self.layout == "diffusers"
        heads = number(config, "num_attention_heads" if diffusers else "num_heads", where)
        if diffusers:
            width = heads * number(config, "attention_head_dim", where)
        else:
            width = number(config, "dim", where)
        split = split_heads(width, heads, str(where))
        text = weights.shape("video.condition_embedder.text_embedder.linear_1.weight", 2)[1]
        expert = ExpertConfig(
            dim=width,
            ffn_dim=number(config, "ffn_dim", where),
            num_layers=number(config, "num_layers", where),
            num_heads=split[0],
            head_dim=split[1],
            text_dim=number(config, "text_dim", where) if "text_dim" in config else text,
            freq_dim=number(config, "freq_dim", where),
            eps=float(config.get("eps", 1e-6)),
        )
        names = ("in_channels", "out_channels") if diffusers else ("in_dim", "out_dim")
        return expert, number(config, names[0], where), number(config, names[1], where)


def find_transformer(root: Path) -> WanTransformer | None:
    """The transformer of a Wan release at `root`, told by the names of its tensors; None if there is none.

    Raises:
        SimForcingError: it is damaged, or one of a release with two transformers.
    """
    if (root / "transformer_2").is_dir():
        raise SimForcingError(f"{root} holds two transformers (transformer_2/); import Wan2.2-TI2V-5B, which has one")
    for directory in (root / "transformer", root):
        if (directory / "config.json").is_file() and any(directory.glob(f"{STEM}*.safetensors*")):
            keys = tensor_names(directory, STEM)
            if any(key.startswith("condition_embedder.") for key in keys):
                return WanTransformer(directory, "diffusers")
            if any(key.startswith("time_projection.") for key in keys):
                return WanTransformer(directory, "original")
    return None


def tensor_names(directory: Path, stem: str) -> set[str]:
    """Names of all tensors of a checkpoint, from its headers alone."""
    names: set[str] = set()
    for file in shards(directory, stem):
        try:
            with safe_open(file, "pt") as opened:
                names |= set(opened.keys())
        except (SafetensorError, OSError) as error:
            raise SimForcingError(f"{file} is not a safetensors file, or is damaged: {error}") from error
    return names
