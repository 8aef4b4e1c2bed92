"""Reads RLDS datasets of Bridge (tfrecords with one episode a record) without TensorFlow.

Both layouts in circulation: `action` as 7 numbers, or in parts (`world_vector`, `rotation_delta`, `open_gripper`).
Actions are deltas of the measured pose in the base frame with Euler angles, gripper 1 = open; 5 Hz.

Shapes: N steps of an episode, D width of a feature.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from simforcing.data.episode import ActionConvention, StateConvention
from simforcing.data.lerobot_tables import read_json
from simforcing.data.problems import Problems
from simforcing.data.source import PictureFootage, Rows, Source, Survey
from simforcing.data.tfrecord import Feature, Record, parse_example, records
from simforcing.errors import SimForcingError

FPS = 5.0
NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")

_SHARD = re.compile(r"(?P<name>.+)-(?P<split>[A-Za-z0-9_]+)\.tfrecord(-\d+-of-\d+)?$")
_PARTS = ("world_vector", "rotation_delta", "open_gripper")
_PICTURE = "steps/observation/"
_CAMERA = "observation.images."
_TASKS = ("steps/language_instruction", "steps/observation/natural_language_instruction")
_IMAGE = (b"\xff\xd8\xff", b"\x89PNG")


def is_rlds(root: Path) -> bool:
    """Whether there are tfrecords in a directory, or in its only version folder (`1.0.0/`)."""
    return bool(_shards(root))


def survey_rlds(root: Path, problems: Problems) -> Survey:
    """Indexes all records; the first one says which cameras there are.

    Raises SimForcingError if no record can be read. A shard that is damaged further on is reported and read so far.
    """
    shards = _shards(root)
    found, splits = _index(shards, problems)
    if all(record.fault for record in found):
        raise SimForcingError(f"{root}: no record in its tfrecords can be read; download or restore them")
    _compare_info(shards[0].parent, found, problems)
    reader = _Reader(found)
    first = next((example for example in map(reader.try_example, range(len(found))) if example), {})
    pictures = sorted(name.removeprefix(_PICTURE) for name, values in first.items() if _is_picture(name, values))
    if not pictures:
        problems.error("no_camera", f"{root}: no pictures in the first record; export them", file=found[0].path)
    cameras = tuple(_CAMERA + name for name in pictures)
    width = 0 if (state := first.get("steps/observation/state")) is None else len(state) // max(_steps(first), 1)
    names = NAMES if width == 7 else tuple(f"state_{i}" for i in range(width))
    return Survey(
        root=root,
        format="RLDS (tfrecord)",
        fps=FPS,
        robot="widowx",
        cameras=cameras,
        convention=ActionConvention("delta", "state", "base", "euler_xyz", "open_positive", (0.0, 1.0), FPS),
        state_convention=StateConvention("euler_xyz", "open_positive", (0.0, 1.0)) if width == 7 else None,
        sources=[reader.source(i, root, cameras, problems) for i in range(len(found))],
        state_names=names,
        action_names=NAMES,
        splits=splits,
    )


def _shards(root: Path) -> list[Path]:
    here = [path for path in sorted(root.glob("*.tfrecord*")) if _SHARD.match(path.name)]
    versions = [] if here else sorted(path for path in root.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name))
    return here or (_shards(versions[-1]) if versions and versions[-1].is_dir() else [])


def _split_of(path: Path) -> str:
    match = _SHARD.match(path.name)
    return match["split"] if match else ""


def _index(shards: Sequence[Path], problems: Problems) -> tuple[list[Record], dict[str, list[int]]]:
    found: list[Record] = []
    splits: dict[str, list[int]] = {}
    for path in shards:
        try:
            for record in records(path):
                splits.setdefault(_split_of(path), []).append(len(found))
                found.append(record)
        except SimForcingError as error:
            problems.error("unreadable_table", str(error), episode=len(found), file=path)
            splits.setdefault(_split_of(path), []).append(len(found))
            found.append(Record(path, -1, 0, 0, fault=str(error)))  # whatever was from here on, as one episode
    return found, splits


def _compare_info(folder: Path, found: Sequence[Record], problems: Problems) -> None:
    """Compares `dataset_info.json`, where there is one, with the records per split."""
    path = folder / "dataset_info.json"
    if not path.is_file():
        return
    try:
        listed = read_json(path).get("splits") or []
        stated = {str(entry["name"]): sum(int(n) for n in entry["shardLengths"]) for entry in listed}
    except (SimForcingError, KeyError, TypeError, ValueError) as error:
        problems.warn("contradicting_metadata", f"{path}: splits cannot be read ({error})", file=path)
        return
    for name, count in stated.items():
        there = sum(_split_of(record.path) == name and not record.fault for record in found)
        if there == 0:
            problems.warn(
                "missing_split", f"{path}: says {count} episodes of split {name!r}, no file has it", file=path
            )
        elif there != count:
            problems.warn(
                "contradicting_metadata", f"{path}: says {count} episodes of {name!r}, found {there}", file=path
            )


def _is_picture(name: str, values: Feature) -> bool:
    return name.startswith(_PICTURE) and isinstance(values, list) and bool(values) and values[0].startswith(_IMAGE)


def _steps(example: Mapping[str, Feature]) -> int:
    """Number of steps, by a feature that has one value a step."""
    for name in ("steps/is_first", "steps/is_last", "steps/reward", *_TASKS):
        if name in example and len(example[name]):
            return len(example[name])
    return 0


@dataclass
class _Reader:
    """Parses records; keeps the last one, since all cameras of an episode lie in it."""

    found: Sequence[Record]
    last: tuple[int, dict[str, Feature]] | None = field(default=None, repr=False)

    def example(self, index: int) -> dict[str, Feature]:
        """Features of a record by name; the last one read is kept.

        Raises:
            SimForcingError: the record is damaged; says which.
        """
        if self.last is None or self.last[0] != index:
            record = self.found[index]
            try:
                self.last = (index, parse_example(record.read()))
            except SimForcingError as error:
                text = str(error)
                raise error if record.where in text else SimForcingError(f"{record.where}: {text}") from error
        return self.last[1]

    def try_example(self, index: int) -> dict[str, Feature]:
        """The example, {} where it cannot be read (which is said where the episode itself is read)."""
        try:
            return self.example(index)
        except SimForcingError:
            return {}

    def source(self, index: int, root: Path, cameras: Sequence[str], problems: Problems) -> Source:
        """Episode `index` as a source; what is wrong with it goes to `problems`."""
        record = self.found[index]
        where = f"episode {index} of {root}"
        try:
            example = record.peek()
        except SimForcingError as error:
            if not record.fault:
                message = f"{where}: {record.where}: {error}"
                problems.error("unreadable_table", message, episode=index, file=record.path)
            example = {}
        _compare_flags(example, where, index, record.path, problems)
        footage = {key: PictureFootage(record.path, key, partial(self.pictures, index, key)) for key in cameras}
        return Source(
            index,
            where,
            record.path,
            _steps(example) or None,
            _task(example),
            footage,
            partial(self.load, index),
            record.where,
        )

    def pictures(self, index: int, camera: str) -> Sequence[bytes]:
        """Encoded pictures of a camera, one a step; empty where there are none."""
        values = self.example(index).get(_PICTURE + camera.removeprefix(_CAMERA), [])
        return values if isinstance(values, list) else []

    def load(self, index: int, problems: Problems) -> Rows:
        """State and action [N, D] of a record, checked to have as many values as steps."""
        example, record = self.example(index), self.found[index]
        count = _steps(example)

        def vectors(name: str) -> Float32[np.ndarray, "N D"] | None:
            values = example.get(name)
            if not isinstance(values, np.ndarray) or count == 0 or len(values) == 0:
                return None
            if len(values) % count:
                message = f"{record.where}: {name} has {len(values)} values in {count} steps; re-export"
                problems.error("length_mismatch", message, episode=index, file=record.path)
                return None
            return values.astype(np.float32).reshape(count, -1)

        action = vectors("steps/action")
        if action is None:
            parts = [vectors(f"steps/action/{part}") for part in _PARTS]
            have = [part for part in parts if part is not None]
            action = np.concatenate(have, axis=1) if len(have) == len(parts) else None
        return Rows(state=vectors("steps/observation/state"), action=action, tasks=(_task(example),))


def _task(example: Mapping[str, Any]) -> str:
    for name in _TASKS:
        values = example.get(name)
        if isinstance(values, list) and values:
            return bytes(values[0]).decode("utf-8", "replace").strip()
    return ""


def _compare_flags(example: Mapping[str, Feature], where: str, index: int, path: Path, problems: Problems) -> None:
    """Compares `has_...` flags of an episode with what it holds."""
    wrong = []
    for name, values in example.items():
        flag = name.rpartition("/")[2]
        if not flag.startswith("has_") or not isinstance(values, np.ndarray) or not len(values):
            continue
        what = flag.removeprefix("has_")
        there = bool(_task(example)) if what == "language" else bool(len(example.get(_PICTURE + what, [])))
        if bool(values[0]) != there:
            wrong.append(f"{flag} is {int(values[0])}")
    if wrong:
        message = f"{where}: {', '.join(sorted(wrong))}, but the record says otherwise"
        problems.warn("contradicting_metadata", message, episode=index, file=path)
