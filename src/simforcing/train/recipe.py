"""What a named configuration consists of."""

from dataclasses import dataclass
from typing import Literal

from simforcing.data.windows import ClipRule
from simforcing.model.experts import ExpertConfig
from simforcing.train.loop import TrainConfig
from simforcing.train.objective import ObjectiveConfig

Role = Literal["teacher", "student", "baseline"]


@dataclass(frozen=True)
class Recipe:
    """All that a run needs besides data. Lengths of runs are defaults; the command line may set others."""

    video: ExpertConfig
    action: ExpertConfig
    rule: ClipRule
    codec: str
    text: str
    text_length: int
    text_pooling: Literal["tokens", "mean"]
    action_positions: Literal["index", "frame"]
    teacher: TrainConfig
    student: TrainConfig
    baseline: TrainConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    window_every: int = 1  # rows between the starts of encoded windows
    notes: tuple[str, ...] = ()

    def training(self, role: Role) -> TrainConfig:
        """How a role is trained."""
        config: TrainConfig = getattr(self, role)
        return config
