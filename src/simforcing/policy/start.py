"""What a policy starts from: nothing, a base video model, or a world model (teacher, student, baseline).

A world model's action expert reads *clean* actions at time 0, a policy's denoises noisy ones, and a world model never
trains its action head: what is taken over is a choice, `action_from`, and every tensor is accounted for in a report.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from simforcing.errors import InputError
from simforcing.files import write_text
from simforcing.model.backbone import resize
from simforcing.model.experts import ExpertConfig
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_strictly
from simforcing.policy.policy import Policy, PolicyConfig

Source = Literal["nothing", "base", "teacher", "student", "baseline"]
ActionFrom = Literal["source", "video", "nothing"]
Shape = tuple[int, ...]

UNTRAINED = "a world model does not train it"
ELSEWHERE = "not asked for"


@dataclass(frozen=True)
class StartReport:
    """Where each tensor of a policy comes from, and which of the source's were left out.

    copied: name -> name in the source. resized: name -> name in the source, shape there, shape here.
    new, left_out: name -> why.
    """

    source: Source
    where: str
    action_from: ActionFrom
    copied: dict[str, str]
    resized: dict[str, tuple[str, Shape, Shape]]
    new: dict[str, str]
    left_out: dict[str, str]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For reading: a line for each part of the networks and what became of it."""
        fates = [(_part(name), f"taken from {_part(source)}") for name, source in self.copied.items()]
        fates += [(_part(name), f"resized from {_part(source)}") for name, (source, _, _) in self.resized.items()]
        fates += [(_part(name), f"new ({why})") for name, why in self.new.items()]
        fates += [(f"the source's {_part(name)}", f"left out ({why})") for name, why in self.left_out.items()]
        counted = [f"{part}: {n} tensor{'s' * (n > 1)} {fate}" for (part, fate), n in Counter(fates).items()]
        return [f"policy from {self.source} {self.where}".rstrip(), *counted, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, every tensor by name."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def write(self, path: Path) -> None:
        """Stores it beside a run, as JSON; replaces what is there."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")


def new_policy(config: PolicyConfig, preparation: Preparation | None = None, seed: int = 0) -> Policy:
    """A policy with fresh weights, which follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(config, preparation)


def initialised(
    config: PolicyConfig,
    preparation: Preparation | None = None,
    source: WorldModel | None = None,
    kind: Source = "nothing",
    action_from: ActionFrom | None = None,
    seed: int = 0,
    where: str = "",
) -> tuple[Policy, StartReport]:
    """A policy that starts from a model, and the report on it. Weights are float32 copies.

    kind: what `source` is. Of a `base` video model only the video expert is taken.
    action_from: where blocks and embeddings of the action expert come from: the source's action expert (default), its
        video expert (default of a base model), each resized where it has another width; or nothing. The head is always
        new; the action encoder is, too, where the source's does not fit.
    where: the source's name, for the report.

    Raises:
        InputError: source and kind contradict each other, or the video experts differ in what cannot be taken over.
    """
    if (source is None) != (kind == "nothing"):
        raise InputError(f"kind = {kind!r} {'without' if source is None else 'with'} a source; give both, or neither")
    policy = new_policy(config, preparation, seed)
    if source is None:
        return policy, StartReport(kind, where, "nothing", {}, {}, dict.fromkeys(policy.state_dict(), "random"), {})
    if action_from is None:
        action_from = "video" if kind == "base" else "source"
    if kind == "base" and action_from == "source":
        raise InputError("a base video model has no action expert; action_from must be 'video' or 'nothing'")
    _check_source(config, source, preparation)
    theirs, ours = source.state_dict(), policy.state_dict()
    report = StartReport(kind, where, action_from, {}, {}, {}, {}, tuple(_notes(config, source.config)))
    for name, tensor in ours.items():
        origin, why = _origin(name, tensor.shape, theirs, kind, action_from)
        if origin is None:
            report.new[name] = why
            continue
        found = theirs[origin].to(tensor.device, torch.float32, copy=True)
        if found.shape == tensor.shape:
            report.copied[name] = origin
        else:
            report.resized[name] = (origin, tuple(found.shape), tuple(tensor.shape))
        ours[name] = resize(found, tensor.shape)
    used = {*report.copied.values(), *(origin for origin, _, _ in report.resized.values())}
    report.left_out.update({name: _why_left_out(name, kind, report) for name in theirs if name not in used})
    load_strictly(policy, ours, "the policy")
    return policy, report


def _origin(
    name: str, shape: torch.Size, theirs: Mapping[str, Tensor], kind: Source, action_from: ActionFrom
) -> tuple[str | None, str]:
    """Name in the source of what a tensor starts as; or None, and why it is new."""
    if name.startswith("proprio."):
        if kind == "base":
            return None, "a base video model has none"
        return (name, "") if theirs[name].shape == shape else (None, "the source's states have another width")
    if name.startswith("video."):
        return name, ""
    if name.startswith("action.head."):
        return None, UNTRAINED
    if action_from == "nothing":
        return None, "random, as asked"
    if name.startswith("action.action_encoder."):
        if action_from == "video":
            return None, "a video expert has none"
        numbers = theirs["action.action_encoder.weight"].shape[1]
        if name.endswith("weight") and shape[1] != numbers:
            return None, f"the source's actions have {numbers} numbers"
        return name, ""
    return (name if action_from == "source" else name.replace("action.", "video.", 1)), ""


def _why_left_out(name: str, kind: Source, report: StartReport) -> str:
    if name.startswith("sim."):
        return "a policy sees no simulation"
    if name.startswith("action.") and (kind == "base" or report.action_from != "source"):
        return ELSEWHERE
    return report.new.get(name, ELSEWHERE)


def _notes(config: PolicyConfig, source: WorldModelConfig) -> Iterator[str]:
    if source.attention != config.attention:
        yield "the source's first frame sees later ones, the policy's does not"
    if source.action_positions != config.action_positions:
        yield f"action positions: {source.action_positions} in the source, {config.action_positions} here"


def _check_source(config: PolicyConfig, source: WorldModel, preparation: Preparation | None) -> None:
    """Refuses a source whose video expert would mean nothing in this policy, and names what differs."""
    pairs = {f"video.{f.name}": (getattr(config.video, f.name), getattr(source.config.video, f.name))
             for f in fields(ExpertConfig)}  # fmt: skip
    pairs |= {name: (getattr(config, name), getattr(source.config, name)) for name in ("channels", "patch")}
    if preparation is not None and source.preparation is not None:
        mine, other = preparation, source.preparation
        pairs |= {name: (getattr(mine, name), getattr(other, name)) for name in ("codec_identity", "text")}
    if differs := [f"{name} is {theirs}, not {ours}" for name, (ours, theirs) in pairs.items() if ours != theirs]:
        raise InputError(f"the model to start from does not fit the policy: {'; '.join(differs)}")


def _part(name: str) -> str:
    """The part of a network that a tensor belongs to."""
    parts: Sequence[str] = name.split(".")
    return ".".join(parts[:2]) if parts[1] in ("action_encoder", "head") else parts[0]
