"""What a policy is to start from, as it is named on a command line: what kind of model it is, and where it lies."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from simforcing.errors import SimForcingError
from simforcing.model.world_model import WorldModel, located
from simforcing.policy.start import Source

NOTHING = "none"


@dataclass(frozen=True)
class Start:
    """A model to start from. kind: None where that is not said and is found out when it is opened."""

    kind: Source | None
    place: str

    @classmethod
    def parse(cls, text: str) -> "Start":
        """`none`, a directory or repository of the hub, one with its kind before it (`base:DIR`), or `bundled-...`.

        Raises:
            SimForcingError: a kind without a place.
        """
        if text == NOTHING:
            return cls("nothing", "")
        if located(text) != Path(text):
            return cls("student" if text == "bundled-student" else "teacher", text)
        kinds = [kind for kind in get_args(Source) if kind != "nothing"]
        kind, _, place = text.partition(":")
        if kind in kinds:
            if not place:
                raise SimForcingError(f"--from {kind}: say where it lies, --from {kind}:DIR")
            return cls(kind, place)  # type: ignore[arg-type]
        return cls(None, text)

    def open(self) -> tuple[Source, WorldModel | None]:
        """The model, and its kind: as it was said, else as its run or its own configuration say.

        Raises:
            SimForcingError: there is no world model.
        """
        if self.kind == "nothing":
            return "nothing", None
        model = WorldModel.from_pretrained(self.place)
        return self.kind or _kind(model, Path(self.place)), model


def _kind(model: WorldModel, place: Path) -> Source:
    """Without a run beside it: a model that says nothing of its inputs was imported, one that sees simulation is a
    student.
    """
    run = place.parent / "run.json"
    if run.is_file():
        role = json.loads(run.read_text()).get("role")
        if role in ("teacher", "student", "baseline"):
            found: Source = role
            return found
    if model.preparation is None:
        return "base"
    return "student" if model.config.sim_condition else "teacher"
