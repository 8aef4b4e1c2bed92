"""UMT5, the text encoder of Wan2.2: its weights in either layout, and its embeddings in files.

Legend: L context tokens (128), X text width (4096 for UMT5-XXL), n valid tokens of one prompt.

A directory holds it in Hugging Face's layout (`text_encoder/` and `tokenizer/`, as in a diffusers release, or all in
one place) or in the original one (`models_t5_*.pth` and `google/umt5-xxl/`). Embeddings that are computed already are
read from files as the authors' scripts write them, one a prompt, and then neither weights nor `transformers` is needed.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.files import partial_path
from simforcing.model.text import TextEncoder, prompt_key
from simforcing.model.weights import (
    FLOATING,
    Weights,
    number,
    read_json,
    read_pickle,
    read_shards,
    read_state,
    torch_file,
)

STEM = "model"
PREFIX = "umt5:"
_SIZES = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size", "relative_attention_num_buckets")
_EMBEDDING = "encoder.embed_tokens.weight"  # the same tensor as shared.weight; files hold one of them, or both
_TOKENIZER_FILES = ("tokenizer.json", "spiece.model")


def original_name(ours: str) -> str:
    """The original name of a parameter that Hugging Face's UMT5 encoder names `ours`."""
    fixed = {"shared.weight": "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}
    if ours in fixed:
        return fixed[ours]
    _, _, block, _, layer, rest = ours.split(".", 5)
    if rest == "layer_norm.weight":
        return f"blocks.{block}.norm{int(layer) + 1}.weight"
    part = rest.split(".")[1]
    names = {"relative_attention_bias": "pos_embedding.embedding"} | {k: f"attn.{k}" for k in "qkvo"}
    names |= {"wi_0": "ffn.gate.0", "wi_1": "ffn.fc1", "wo": "ffn.fc2"}
    return f"blocks.{block}.{names[part]}.weight"


def parameter_shapes(config: Mapping[str, Any], where: Path | str) -> dict[str, torch.Size]:
    """Names and shapes of an encoder's parameters, as Hugging Face's UMT5 has them (shared embedding once)."""
    width, head, inner, layers, heads, words, buckets = (number(config, key, where) for key in _SIZES)
    result = {"shared.weight": (words, width), "encoder.final_layer_norm.weight": (width,)}
    for i in range(layers):
        attention, feed = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        result |= {f"{attention}.SelfAttention.{k}.weight": (heads * head, width) for k in "qkv"}
        result[f"{attention}.SelfAttention.o.weight"] = (width, heads * head)
        result[f"{attention}.SelfAttention.relative_attention_bias.weight"] = (buckets, heads)
        result |= {f"{feed}.DenseReluDense.{k}.weight": (inner, width) for k in ("wi_0", "wi_1")}
        result[f"{feed}.DenseReluDense.wo.weight"] = (width, inner)
        result |= {f"{layer}.layer_norm.weight": (width,) for layer in (attention, feed)}
    return {key: torch.Size(shape) for key, shape in result.items()}


@dataclass(frozen=True)
class UMT5Files:
    """Where a UMT5 encoder lies: weights (a directory of Hugging Face, or an original .pth) and tokeniser."""

    weights: Path
    tokenizer: Path

    @property
    def original(self) -> bool:
        """Whether the weights are in the original layout."""
        return self.weights.is_file()

    def config(self) -> dict[str, Any]:
        """Sizes, as in Hugging Face's `config.json`; those of the original layout come from shapes."""
        return self._original_config() if self.original else read_json(self.weights / "config.json")

    def state(self) -> dict[str, Tensor]:
        """Parameters under Hugging Face's names, strictly.

        Raises:
            SimForcingError: tensors are missing, unexpected or wrongly shaped (listed).
        """
        where = str(self.weights)
        if self.original:
            weights = Weights(self._tensors, original_name, where)
        else:
            tensors = dict(read_shards(self.weights, STEM))
            same = tensors.pop(_EMBEDDING, None)
            if same is not None and not torch.equal(tensors.setdefault("shared.weight", same), same):
                raise SimForcingError(f"{where}: shared.weight and {_EMBEDDING} differ, but are one embedding")
            weights = Weights(tensors, lambda ours: ours, where)
        return weights.fitted(parameter_shapes(self.config(), where))

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return read_state(self.weights)

    def _original_config(self) -> dict[str, Any]:
        weights = Weights(self._tensors, lambda theirs: theirs, str(self.weights))
        words, width = weights.shape("token_embedding.weight", 2)
        buckets, heads = weights.shape("blocks.0.pos_embedding.embedding.weight", 2)
        inner = weights.shape("blocks.0.attn.q.weight", 2)[0]
        if inner % heads:
            raise SimForcingError(f"{self.weights}: attention width {inner} does not divide into {heads} heads")
        return {
            "architectures": ["UMT5EncoderModel"],
            "model_type": "umt5",
            "d_model": width,
            "d_kv": inner // heads,
            "d_ff": weights.shape("blocks.0.ffn.fc1.weight", 2)[0],
            "num_layers": weights.count("blocks."),
            "num_heads": heads,
            "vocab_size": words,
            "relative_attention_num_buckets": buckets,
            "relative_attention_max_distance": 128,
            "feed_forward_proj": "gated-gelu",
            "layer_norm_epsilon": 1e-6,
            "dropout_rate": 0.1,
            "is_encoder_decoder": True,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


def find_umt5(root: Path) -> UMT5Files:
    """The encoder and its tokeniser in a directory of either layout.

    Raises:
        SimForcingError: one of them is missing.
    """
    if not root.is_dir():
        raise SimForcingError(f"text encoder {PREFIX}{root}: no such directory")
    weights = find_weights(root)
    if weights is None:
        raise SimForcingError(
            f"{root} holds no UMT5: text_encoder/ with config.json of model_type umt5, or models_t5_*.pth"
        )
    places = (root / "tokenizer", root / "google" / "umt5-xxl", root)
    for place in places:
        if any((place / name).is_file() for name in _TOKENIZER_FILES):
            return UMT5Files(weights, place)
    raise SimForcingError(
        f"{root} holds no tokeniser: {' or '.join(_TOKENIZER_FILES)} in tokenizer/ or google/umt5-xxl/"
    )


def find_weights(root: Path) -> Path | None:
    """A directory of Hugging Face's UMT5 at or in `root`, or the original file in it; None if there is neither."""
    for directory in (root / "text_encoder", root):
        config = directory / "config.json"
        if config.is_file() and read_json(config).get("model_type") == "umt5":
            return directory
    return torch_file(root, is_original)


def is_original(names: set[str]) -> bool:
    """Whether the names of tensors are those of the original UMT5 encoder."""
    return "token_embedding.weight" in names and any(".pos_embedding." in name for name in names)


def cleaned(text: str) -> str:
    """A prompt as the tokeniser gets it: HTML entities resolved (twice), runs of white space as one space, ends cut."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


class UMT5(TextEncoder):
    """Last hidden states of a UMT5 encoder, in the dtype of its weights. Loaded when the first prompt is encoded."""

    name = "umt5"

    def __init__(self, root: Path, length: int = 128) -> None:
        super().__init__(length)
        self.files = find_umt5(root)
        self.width = number(self.files.config(), "d_model", self.files.weights)

    def tokens(self, text: str) -> Float32[Tensor, "n X"]:
        """Raises SimForcingError where the extra `text` is not installed, or the files are damaged."""
        context, mask = self.padded(text)
        return context[mask].float()

    @torch.no_grad()
    def padded(self, text: str) -> tuple[Float[Tensor, "L X"], Bool[Tensor, "L"]]:
        """All rows of one prompt, those of padding as the network leaves them, and the mask of its tokens.

        Raises:
            SimForcingError: the prompt has more than `length` tokens; nothing is cut off.
        """
        tokenizer, network = self._network
        ids = tokenizer(cleaned(text), add_special_tokens=True)["input_ids"]
        if len(ids) > self.length:
            raise SimForcingError(
                f"prompt of {len(ids)} tokens, text length {self.length}: ...{text[-60:]!r}; shorten it"
            )
        padding = self.length - len(ids)
        mask = torch.arange(self.length) < len(ids)
        hidden: Tensor = network(
            input_ids=torch.tensor([ids + [0] * padding]), attention_mask=mask[None].long()
        ).last_hidden_state[0]
        return hidden, mask

    def save_cache(self, directory: Path, prompts: Sequence[str]) -> None:
        """Write one file a prompt, as `T5Cache` and the authors' scripts read it; existing ones are left alone."""
        directory.mkdir(parents=True, exist_ok=True)
        for text in prompts:
            path = cache_path(directory, text, self.length)
            if not path.exists():
                context, mask = self.padded(text)
                partial = partial_path(path)
                try:
                    torch.save({"context": context.bfloat16().clone(), "mask": mask}, partial)
                    partial.rename(path)
                finally:
                    partial.unlink(missing_ok=True)

    @cached_property
    def _network(self) -> tuple[Any, Any]:
        """Tokeniser and encoder, from local files alone."""
        try:
            from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel
        except ModuleNotFoundError as error:
            raise SimForcingError(
                f"computing text with UMT5 needs {error.name}; pip install 'simforcing[text]', or name a directory of "
                "embeddings that are computed already"
            ) from error
        state = self.files.state()
        config = UMT5Config.from_dict(self.files.config())
        with torch.device("meta"):
            network = UMT5EncoderModel(config)
        network.load_state_dict(state | {_EMBEDDING: state["shared.weight"]}, assign=True)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.files.tokenizer, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise SimForcingError(f"{self.files.tokenizer} holds no tokeniser that can be read: {error}") from error
        return tokenizer, network.eval().requires_grad_(False)


def cache_path(directory: Path, text: str, length: int) -> Path:
    """The file of one prompt's embedding, as the authors' scripts name it."""
    return directory / f"{prompt_key(text)}.t5_len{length}.wan22ti2v5b.pt"


def is_cache(directory: Path) -> bool:
    """Whether a directory holds embeddings in files."""
    return directory.is_dir() and any(directory.glob("*.t5_len*.wan22ti2v5b.pt"))


class T5Cache(TextEncoder):
    """Embeddings from files {context [L, X], mask [L]}, one a prompt; a prompt without a file is an error."""

    name = "umt5-cache"

    def __init__(self, directory: Path, length: int = 128) -> None:
        super().__init__(length)
        self.directory = directory
        found = sorted(directory.glob(f"*.t5_len{length}.wan22ti2v5b.pt"))
        if not found:
            raise SimForcingError(f"{directory} holds no embeddings of text length {length} (*.t5_len{length}.*.pt)")
        self.width = self._read(found[0])[0].shape[1]

    def tokens(self, text: str) -> Float32[Tensor, "n X"]:
        """Raises SimForcingError for a prompt that has no file, or a file that is damaged."""
        path = cache_path(self.directory, text, self.length)
        if not path.is_file():
            raise SimForcingError(
                f"prompt ...{text[-60:]!r} has no embedding in {self.directory} ({path.name}); compute it, or name the "
                f"encoder as {PREFIX}DIR"
            )
        context, mask = self._read(path)
        if context.shape[1] != self.width:
            raise SimForcingError(f"{path} is {context.shape[1]} wide, other embeddings there are {self.width}")
        return context[mask].float()

    def _read(self, path: Path) -> tuple[Tensor, Tensor]:
        content = read_pickle(path)
        context, mask = (content.get(key) if isinstance(content, Mapping) else None for key in ("context", "mask"))
        if (
            not isinstance(context, Tensor)
            or not isinstance(mask, Tensor)
            or context.ndim != 2
            or context.dtype not in FLOATING
            or mask.shape != context.shape[:1]
            or len(mask) != self.length
        ):
            raise SimForcingError(f"{path} is no embedding: 'context' [{self.length}, X] and 'mask' [{self.length}]")
        mask = mask.bool()
        if bool((~mask[:-1] & mask[1:]).any()):
            raise SimForcingError(f"{path}: its mask has valid tokens after padding")
        return context, mask
