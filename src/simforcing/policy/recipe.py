"""What a named configuration of a policy consists of."""

from dataclasses import dataclass, replace

from simforcing.data.windows import ClipRule
from simforcing.policy.windows import AfterEnd
from simforcing.train.config import TrainConfig
from simforcing.train.recipe import Sizes


@dataclass(frozen=True, kw_only=True)
class PolicyRecipe(Sizes):
    """All that a run needs besides data and the setting. `rule` is about one camera: all have the same size.

    after_end: what a robot is told beyond the end of an episode (see `PolicyWindows`); None: by what its actions mean.
    """

    training: TrainConfig
    after_end: AfterEnd | None = None

    def rule_of(self, cameras: int) -> ClipRule:
        """The clip rule of so many cameras side by side."""
        return replace(self.rule, width=self.rule.width * cameras)
