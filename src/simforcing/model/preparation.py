"""How pictures, numbers and words outside the network become what it was trained on; travels inside its directory.

Legend: B batch, A actions, L context tokens, X text width.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from simforcing.data.episode import ActionConvention
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.model.codec import BUNDLED, Codec, load_codec
from simforcing.model.text import PROMPTS, Domain, TextEncoder


@dataclass(frozen=True)
class Preparation:
    """Codec, text encoder, clip rule, action convention, prompt templates and statistics of a model.

    text_pooling: `tokens` gives the network one token a word piece, `mean` one token a prompt.
    """

    action_stats: Normalizer
    state_stats: Normalizer
    rule: ClipRule = ClipRule()
    action: ActionConvention = ActionConvention()
    codec: str = BUNDLED
    codec_identity: dict[str, Any] = field(default_factory=dict)
    text: str = "minilm"
    text_length: int = 32
    text_pooling: Literal["tokens", "mean"] = "mean"
    text_padding: Literal["masked", "zeros"] = "masked"
    prompts: dict[str, str] = field(default_factory=lambda: dict(PROMPTS))

    def context(self, tasks: Sequence[str], domain: Domain) -> tuple[Float[Tensor, "B L X"], Bool[Tensor, "B L"]]:
        """Embedded instructions in the domain's prompt template."""
        texts = [self.prompts[domain].format(task=task) for task in tasks]
        context, mask = self._encoder.encode(texts)
        if self.text_pooling == "tokens":
            if self.text_padding == "masked":
                return context, mask
            return torch.where(mask[..., None], context, 0), torch.ones_like(mask)
        count = mask.sum(1, keepdim=True)
        return (context.sum(1) / count)[:, None], torch.ones(len(tasks), 1, dtype=torch.bool)

    def normalise(self, action: np.ndarray, state: np.ndarray) -> tuple[Tensor, Tensor]:
        """Stored actions [..., a] and states [..., p] to about [-1, 1]."""
        return torch.from_numpy(self.action_stats.normalize(action)), torch.from_numpy(
            self.state_stats.normalize(state)
        )

    def load_codec(self) -> Codec:
        """The codec that the model was trained with.

        Raises:
            SimForcingError: the codec found is another one.
        """
        codec = load_codec(self.codec)
        if self.codec_identity and codec.identity != self.codec_identity:
            raise SimForcingError(
                f"codec {self.codec} is {codec.identity}, but the model was trained with {self.codec_identity}"
            )
        return codec

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder.load(self.text, self.text_length)

    def to_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain values: what goes into `config.json`, and the statistics for `stats.json`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.name.endswith("_stats")}
        plain = {
            k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) and not isinstance(v, type) else v
            for k, v in values.items()
        }
        stats = {"action": self.action_stats.to_dict(), "state": self.state_stats.to_dict()}
        return json.loads(json.dumps(plain)), stats

    @classmethod
    def from_dict(cls, plain: dict[str, Any], stats: dict[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            SimForcingError: a key is missing or unknown.
        """
        try:
            rest = {k: v for k, v in plain.items() if k not in ("rule", "action")}
            return cls(
                action_stats=Normalizer.from_dict(stats["action"]),
                state_stats=Normalizer.from_dict(stats["state"]),
                rule=ClipRule(**plain["rule"]),
                action=ActionConvention.from_dict(plain["action"]),
                **rest,
            )
        except (KeyError, TypeError) as error:
            raise SimForcingError(f"the model's preparation does not fit this version: {error}") from error
