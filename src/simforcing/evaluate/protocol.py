"""What a number means: the conditions under which it was measured, and a refusal to mix different ones."""

import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from simforcing.errors import SimForcingError
from simforcing.evaluate.metrics import definitions


@lru_cache(maxsize=1)
def code_version() -> str:
    """Version of the package, with ``git describe`` where it runs from a checkout that tracks it."""
    try:
        version = importlib.metadata.version("simforcing")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    described = _git_describe(Path(__file__))
    return f"{version} ({described})" if described else version


@lru_cache(maxsize=1)
def describe_machine() -> dict[str, str | int]:
    """CPU model, usable cores, torch's version and threads, GPU where there is one, Python and system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine: dict[str, str | int] = {"cpu": _cpu_model(), "cores": cores}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
        machine["gpus"] = torch.cuda.device_count()
    return machine | {
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_describe(file: Path) -> str | None:
    """None outside a checkout, without git, or where the checkout around the package does not track it."""
    for command in (
        ["ls-files", "--error-unmatch", file.name],
        ["describe", "--always", "--dirty", "--tags"],
    ):
        try:
            done = subprocess.run(
                ["git", *command], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout.strip() or None


@dataclass(frozen=True)
class Protocol:
    """Everything that two numbers must share to be compared.

    ``split_sha256`` names the split file, ``clips_sha256`` the held-out windows in their order (`hash_clips`);
    ``frames`` a clip including the given first one; ``fps`` in Hz; steps and ``guidance`` are None where a method has
    none (`METHOD` names the fields that belong to a method). ``simulation`` says where the condition comes from,
    ``simulator_sha256`` the weights of another model that predicts it (whatever the model is called, they are what
    is compared),
    ``control`` what was spoilt on purpose. ``metrics`` holds each metric's definition, ``networks`` the sha256 of every
    network that a metric looked through, ``machine`` what `describe_machine` found.
    """

    split_sha256: str
    clips_sha256: str
    clips: int
    frames: int
    fps: float
    height: int
    width: int
    sim_steps: int | None = None
    real_steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    first_frame: bool = False
    simulation: str = ""
    guidance_kind: str = "branches"
    control: str = ""
    simulator_sha256: str = ""
    metrics: Mapping[str, str] = field(default_factory=definitions)
    networks: Mapping[str, str] = field(default_factory=dict)
    code: str = field(default_factory=code_version)
    machine: Mapping[str, str | int] = field(default_factory=describe_machine)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in the order of the fields."""
        mappings = {"metrics": dict(self.metrics), "networks": dict(self.networks), "machine": dict(self.machine)}
        return {**asdict(self), **mappings}

    def compared(self) -> dict[str, Any]:
        """`to_dict` for comparisons: a simulating model is its weights, not how its name was spelt."""
        return self.to_dict() | ({"simulation": "another model"} if self.simulator_sha256 else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Protocol":
        """Inverse of `to_dict`; an unknown or missing key raises `SimForcingError` that names it."""
        known = [f.name for f in fields(cls)]
        _refuse_unknown(values, known)
        missing = [key for key in known if key not in values and key != "simulator_sha256"]
        if missing:
            raise SimForcingError(f"the protocol lacks '{missing[0]}'; evaluate again with this version")
        return cls(**values)


METHOD = ("sim_steps", "real_steps", "guidance", "guidance_kind", "simulation", "control", "simulator_sha256")
"""Fields in which the methods of one table may differ without a word: they are what is compared."""


def check_same(protocols: Mapping[str, Protocol], allow: Collection[str] = ()) -> None:
    """Refuse to put results side by side that were not measured alike.

    ``protocols`` maps a result's name to its protocol; ``allow`` names fields in which they may differ,
    e.g. ``{"guidance"}`` for a sweep over it, or ``{"machine"}`` where no times are compared. Raises
    `SimForcingError` that names the first field that differs, and both values.
    """
    _refuse_unknown(allow, [f.name for f in fields(Protocol)])
    named = list(protocols.items())
    for name, protocol in named[1:]:
        first_name, first = named[0][0], named[0][1].compared()
        for key, value in protocol.compared().items():
            if key not in allow and value != first[key]:
                where, left, right = _where(key, first[key], value)
                raise SimForcingError(
                    f"'{first_name}' and '{name}' differ in {where}: {left!r} against {right!r}; "
                    "evaluate both alike before comparing them"
                )


def mixed(protocols: Mapping[str, Protocol], allow: Collection[str]) -> list[str]:
    """Sentences that say in which of the allowed fields results differ, for the page that shows them together."""
    _refuse_unknown(allow, [f.name for f in fields(Protocol)])
    sentences = []
    for key in allow:
        values: dict[str, list[str]] = {}
        for name, protocol in protocols.items():
            values.setdefault(json.dumps(protocol.compared()[key], sort_keys=True), []).append(name)
        if len(values) > 1:
            groups = list(values.items())
            where, left, right = _where(key, *(json.loads(v) for v, _ in groups[:2]))
            pair = " against ".join(f"{v!r} ({', '.join(n)})" for v, (_, n) in zip((left, right), groups, strict=False))
            sentences.append(f"These results were not measured alike; they differ in {where}: {pair}.")
    return sentences


def hash_clips(clips: Sequence[tuple[int, int]]) -> str:
    """SHA-256 of the (episode, start) pairs in their order: equal hashes mean the same windows."""
    text = "\n".join(f"{episode},{start}" for episode, start in clips)
    return hashlib.sha256(text.encode()).hexdigest()


def _where(key: str, left: Any, right: Any) -> tuple[str, Any, Any]:
    """The differing field, down to the entry of a mapping."""
    if isinstance(left, dict) and isinstance(right, dict):
        for inner in {**left, **right}:
            if left.get(inner) != right.get(inner):
                return f"'{key}.{inner}'", left.get(inner), right.get(inner)
    return f"'{key}'", left, right


def _refuse_unknown(names: Collection[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise SimForcingError(f"a protocol has no field '{name}'{hint}")
