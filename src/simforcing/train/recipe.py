"""What a named configuration consists of."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from simforcing.data.windows import ClipRule
from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig
from simforcing.train.config import TrainConfig
from simforcing.train.objective import ObjectiveConfig

Role = Literal["teacher", "student", "baseline"]

WAN_CODEC = "wan2.2-vae"
WAN_TEXT = "umt5-xxl"
TO_SUPPLY = {
    WAN_CODEC: "--codec with the directory vae/ of Wan2.2-TI2V-5B in Diffusers layout, or its Wan2.2_VAE.pth",
    WAN_TEXT: "--text umt5:DIR with the directory of Wan2.2-TI2V-5B, or a directory of embeddings of its text encoder",
}
"""Codecs and text encoders that do not come with the package: what a recipe calls them, and what the user gives."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What any network here is made of and looks at.

    codec, text: a source that `load_codec` and `TextEncoder.load` know, or a name of `TO_SUPPLY` that `with_sources`
    replaces by what the user has.
    """

    video: ExpertConfig
    action: ExpertConfig
    rule: ClipRule
    codec: str
    text: str
    text_length: int
    text_pooling: Literal["tokens", "mean"]
    text_padding: Literal["masked", "zeros"] = "masked"
    action_positions: Literal["index", "frame"]
    window_every: int = 1  # rows between the starts of encoded windows
    notes: tuple[str, ...] = ()

    def with_sources(
        self, codec: str | None = None, text: str | None = None, needs: tuple[str, ...] = ("codec", "text")
    ) -> Self:
        """The recipe with the user's codec and text encoder; None keeps the recipe's own. `needs`: what will be used.

        Raises:
            SimForcingError: the recipe's own does not come with the package; says what to give.
        """
        chosen = {"codec": codec or self.codec, "text": text or self.text}
        missing = [chosen[name] for name in needs if chosen[name] in TO_SUPPLY]
        if missing:
            wanted = "; and ".join(TO_SUPPLY[source] for source in missing)
            raise SimForcingError(f"this recipe uses weights that do not come with the package: give {wanted}")
        return replace(self, codec=chosen["codec"], text=chosen["text"])


@dataclass(frozen=True, kw_only=True)
class Recipe(Sizes):
    """All that a run of a world model needs besides data. Lengths are defaults; the command line may set others.

    flow_objective is that of teacher and baseline: its dropouts.
    """

    teacher: TrainConfig
    student: TrainConfig
    baseline: TrainConfig
    objective: ObjectiveConfig = ObjectiveConfig()  # of the student
    flow_objective: ObjectiveConfig = ObjectiveConfig()

    def training(self, role: Role) -> TrainConfig:
        """How a role is trained."""
        config: TrainConfig = getattr(self, role)
        return config
