"""Embeddings of a dataset's instructions in a cache, so that training needs no text encoder.

All prompts are stored, each instruction in each template, as ragged tokens: what a model makes of them (length,
pooling, padding) is its own. MiniLM's are float16 as it gives them, UMT5's bfloat16 as in the authors' files, hashed
words float32; bfloat16 is stored as its bits.

Legend: P prompts, n tokens of one prompt, N tokens of a shard, B samples, L context tokens, X text width.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from simforcing.data.cache import Cache
from simforcing.errors import SimForcingError
from simforcing.model.preparation import Preparation
from simforcing.model.text import PROMPTS, Domain, HashedWords, MiniLM, TextEncoder
from simforcing.model.umt5 import PREFIX, UMT5, T5Cache, cache_path, find_umt5

SHARD = 256
"""Prompts of a shard."""
DENSE = 1 << 28
"""Bytes of float32 up to which the context of all instructions is kept in memory."""
_STORED = {MiniLM.name: "float16", HashedWords.name: "float32", UMT5.name: "bfloat16", T5Cache.name: "bfloat16"}
_EDGE = 1 << 16

Text = tuple[Float[Tensor, "P L X"], Bool[Tensor, "P L"]]


class Words:
    """A text encoder and what is embedded with it. source, length: as `TextEncoder.load` takes them."""

    def __init__(self, source: str, length: int) -> None:
        self.source = source
        self.encoder = TextEncoder.load(source, length)

    def templates(self, tasks: Sequence[str]) -> list[str]:
        """Prompt templates that are embedded: all, or of embeddings in files those that all instructions have."""
        every = sorted(set(PROMPTS.values()))
        if not isinstance(self.encoder, T5Cache):
            return every
        place, length = self.encoder.directory, self.encoder.length
        return [t for t in every if all(cache_path(place, t.format(task=k), length).is_file() for k in tasks)] or every

    def identity(self, tasks: Sequence[str]) -> dict[str, Any]:
        """What makes these embeddings what they are, for a header."""
        return {
            "encoder": self.encoder.name,
            "weights": weights(self.source),
            "width": self.encoder.width,
            "stored": _STORED[self.encoder.name],
            "templates": self.templates(tasks),
        }

    def parts(self, tasks: Sequence[str]) -> list[list[str]]:
        """All prompts, template by template, a list a shard."""
        prompts = _prompts(self.templates(tasks), tasks)
        return [prompts[i : i + SHARD] for i in range(0, len(prompts), SHARD)]

    def embed(self, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Arrays of one shard. Raises SimForcingError for a prompt that has no words, too many, or no embedding."""
        tokens = [context[0][mask[0]] for context, mask in (self.encoder.encode([prompt]) for prompt in prompts)]
        joined = torch.cat(tokens)
        if _STORED[self.encoder.name] == "bfloat16":
            stored = joined.bfloat16().view(torch.int16).numpy()
        else:
            stored = joined.numpy().astype(_STORED[self.encoder.name])
        return {"text": stored, "text_count": np.array([len(t) for t in tokens], np.int32)}


def _prompts(templates: Sequence[str], tasks: Sequence[str]) -> list[str]:
    return [template.format(task=task) for template in templates for task in tasks]


def weights(source: str) -> str | None:
    """Fingerprint of what a text encoder reads, None for one that has its weights by name.

    Of large files the first and last 64 KiB count, of a folder of embeddings names, sizes and the first one's content.

    Raises:
        SimForcingError: there is no encoder at `source`.
    """
    if source in (MiniLM.name, HashedWords.name) or source.endswith(".safetensors"):
        return None
    digest = hashlib.sha256()
    if source.startswith(PREFIX):
        place = find_umt5(Path(source.removeprefix(PREFIX))).weights
        files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
        looked_into = files
    else:
        files = sorted(Path(source).glob("*.pt"))
        looked_into = files[:1]
    if not files:
        raise SimForcingError(f"text encoder {source!r}: nothing there")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        if path in looked_into:
            with path.open("rb") as file:
                digest.update(file.read(_EDGE))
                file.seek(max(0, size - _EDGE))
                digest.update(file.read(_EDGE))
    return digest.hexdigest()[:16]


class StoredText(TextEncoder):
    """Embeddings of a cache, read when asked for; a prompt that is not among them is an error."""

    def __init__(self, cache: Cache, length: int) -> None:
        super().__init__(length)
        about = cache.header["text"]
        self.name, self.width, self._bits = about["encoder"], int(about["width"]), about["stored"] == "bfloat16"
        counts = cache["text_count"].astype(np.int64)
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        prompts = _prompts(about["templates"], cache.header["tasks"])
        self._number = {prompt: i for i, prompt in enumerate(prompts)}
        self._rows, self._where = cache.rows("text"), cache.directory

    def tokens(self, text: str) -> Float32[Tensor, "n X"]:
        """Raises SimForcingError for a prompt that was not embedded."""
        number = self._number.get(text)
        if number is None:
            raise SimForcingError(f"prompt ...{text[-60:]!r} has no embedding in {self._where}; encode it with --text")
        stored = torch.from_numpy(self._rows.take(np.arange(self._begins[number], self._ends[number])))
        return (stored.view(torch.bfloat16) if self._bits else stored).float()


def reading(
    preparation: Preparation, arrays: Mapping[str, np.ndarray], domains: Sequence[Domain] = ("real", "sim")
) -> Preparation:
    """The preparation, with the embeddings of the cache in place of its text encoder where they are the same.

    They are, where encoder and the templates of `domains` are, and its weights as far as they are at hand to be
    compared.
    """
    about = arrays.header.get("text") if isinstance(arrays, Cache) else None
    used = {preparation.prompts[domain] for domain in domains}
    if not isinstance(arrays, Cache) or about is None or not used <= set(about["templates"]):
        return preparation
    if about["encoder"] != family(preparation.text):
        return preparation
    try:
        if weights(preparation.text) != about["weights"]:
            return preparation
    except SimForcingError:  # the encoder is not on this machine, which is what its embeddings are stored for
        pass
    found = replace(preparation)
    vars(found)["_encoder"] = StoredText(arrays, preparation.text_length)  # what it would load when first asked
    return found


def family(source: str) -> str:
    """Name of the encoder that a source stands for, without opening it."""
    if source == HashedWords.name:
        return HashedWords.name
    if source == MiniLM.name or source.endswith(".safetensors"):
        return MiniLM.name
    return UMT5.name if source.startswith(PREFIX) else T5Cache.name


@dataclass(frozen=True)
class LazyText:
    """Context of instructions that is made from stored tokens when a batch asks for it."""

    preparation: Preparation
    tasks: Sequence[str]
    domain: Domain

    def of(self, task: Int64[Tensor, " B"]) -> tuple[Float[Tensor, "B L X"], Bool[Tensor, "B L"]]:
        """Context and mask of each sample's instruction."""
        return self.preparation.context([self.tasks[i] for i in task.tolist()], self.domain)


def table(preparation: Preparation, tasks: Sequence[str], domain: Domain, stored: bool) -> Text | LazyText:
    """Context of all instructions; left where it is stored, if it is and would take more than `DENSE` bytes."""
    first = preparation.context(tasks[:1], domain)[0]
    if stored and len(tasks) * first[0].numel() * first.element_size() > DENSE:
        return LazyText(preparation, tasks, domain)
    made = [preparation.context(tasks[i : i + SHARD], domain) for i in range(0, len(tasks), SHARD)]
    return torch.cat([context for context, _ in made]), torch.cat([mask for _, mask in made])
