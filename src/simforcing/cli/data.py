"""`simforcing data ...`: what a dataset is, what is wrong with it, and bringing it to LeRobot v3.0."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simforcing.data.audit import Audit

SHOWN = 4
"""Findings of a kind that are printed; `--all` and `--json` have every one."""


@dataclass(frozen=True)
class AuditCommand:
    """Say what a dataset is and what is wrong with it, with episode and file of every finding.

    Reads every format: LeRobot v2 and v3, RLDS tfrecords, DROID JSON, npz + mp4, the paired [sim|real] layout.
    Exit code: 0 clean, 1 with findings, 2 not readable.

    Example:
      simforcing data audit data/my_robot --json > audit.json
    """

    data: Annotated[str, tyro.conf.Positional]
    """Directory of the dataset."""
    json: bool = False
    """Print everything as JSON."""
    all: bool = False
    """Print every finding, not the first few of each kind."""
    quick: bool = False
    """Do not decode pictures: no look for damage, black or frozen cameras and lag."""

    def run(self) -> int:
        """Prints the audit; 0 clean, 1 findings."""
        import json

        from simforcing.cli.show import progress
        from simforcing.data.audit import audit

        if not self.data:
            raise SimForcingError("the directory of the dataset is empty text; give its path, or . for this directory")
        with progress() as show:
            found = audit(
                self.data,
                video=not self.quick,
                report=lambda stage, done, total: show(stage, done / max(total, 1), f"{done} of {total}"),
            )
        if self.json:
            print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
        else:
            print("\n".join(_lines(found, None if self.all else SHOWN)))
        return found.exit_code


def _lines(found: "Audit", most: int | None) -> "Iterator[str]":
    """The audit as text."""
    measured = f", measured {found.fps_measured:.4g}" if found.fps_measured is not None else ""
    yield f"{found.root}: {found.format}, {found.robot}"
    yield f"  episodes  {len(found.lengths)} with {sum(found.lengths)} rows"
    if found.lengths:
        yield f"  length    {min(found.lengths)} to {max(found.lengths)} rows"
    yield f"  rate      {found.fps:g} a second as stated{measured}"
    for key in found.cameras:
        about = found.pictures.get(key)
        size = f"{about['height']}x{about['width']} {about['codec']}" if about else "not decoded"
        yield f"  camera    {key}: {size}"
    action = ", ".join(f"{name} {value}" for name, value in found.action.items() if value is not None)
    yield f"  action    {action}"
    for name, size_of_split in found.splits.items():
        yield f"  split     {name}: {size_of_split} episodes"
    for name, count in found.windows.items():
        yield f"  windows   {name}: {count['windows']} in {count['episodes']} episodes"
    for key, lag in found.lag.items():
        yield f"  lag       {key}: {lag.frames:+.1f} frames behind the action (correlation {lag.correlation:.2f})"
    yield from _findings(found, most)


def _findings(found: "Audit", most: int | None) -> "Iterator[str]":
    shown: dict[tuple[str, str], int] = {}
    for finding in found.findings:
        key = (finding.severity, finding.kind)
        shown[key] = shown.get(key, 0) + 1
        if most is None or shown[key] <= most:
            yield f"{finding.severity:<7} {finding.kind}: {finding.message}"
    if most is not None:
        for (severity, kind), count in shown.items():
            if count > most:
                yield f"{severity:<7} {kind}: and {count - most} more (--all)"
    counts = [
        f"{number} {severity}{'s' if number != 1 else ''}"
        for severity in ("error", "warning", "note")
        if (number := sum(f.severity == severity for f in found.findings))
    ]
    yield f"{', '.join(counts)}" if counts else "clean"


@dataclass(frozen=True)
class ConvertCommand:
    """Write a dataset of any supported format as LeRobot v3.0, in the same or another convention.

    Example:
      simforcing data convert data/droid data/droid_v3 --delta state --rotation rotvec
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Directory of the dataset."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory to make; must not exist."""
    absolute: bool = False
    """Actions as absolute target poses in the base frame."""
    delta: Literal["state", "target"] | None = None
    """Actions as changes, of the measured state or of the previous target."""
    frame: Literal["base", "tool"] | None = None
    """Axes of the changes."""
    rotation: Literal["rotvec", "euler_xyz", "quaternion"] | None = None
    """Rotations of states and actions."""
    gripper: Literal["open_positive", "closed_positive"] | None = None
    """Which end of the gripper's range is the greater number."""
    gripper_range: tuple[float, float] | None = None
    """Least and greatest gripper value."""
    fps: float | None = None
    """Rows a second: a divisor of the data's."""
    unwrap: bool = True
    """Take full turns out of absolute rotations, so that angles do not jump at pi."""
    state_from_actions: bool = False
    """Where states are missing, add up the deltas instead, from zero at every episode's first row."""
    skip_bad: bool = False
    """Leave out episodes with errors, count and list them; without it they are an error."""

    def run(self) -> int:
        """Makes the dataset and prints what was made; 0 on success."""
        from simforcing.cli.show import progress
        from simforcing.data.convert import Wanted, convert

        if self.absolute and self.delta is not None:
            raise SimForcingError("--absolute and --delta exclude each other; give one of them")
        wanted = Wanted(
            kind="absolute" if self.absolute else "delta" if self.delta is not None else None,
            relative_to=self.delta,
            frame=self.frame,
            rotation=self.rotation,
            gripper=self.gripper,
            gripper_range=self.gripper_range,
            fps=self.fps,
            unwrap=self.unwrap,
            state_from_actions=self.state_from_actions,
        )
        with progress() as show:
            made = convert(
                self.data,
                self.out,
                wanted,
                skip_bad=self.skip_bad,
                report=lambda stage, done, total: show(stage, done / max(total, 1), f"{done} of {total}"),
            )
        for _, reason in made.skipped:
            print(f"skipped {reason}")
        left_out = f", {len(made.skipped)} skipped" if made.skipped else ""
        kind = made.action.kind + (f" to the {made.action.relative_to}" if made.action.relative_to else "")
        size = f"{made.episodes} episodes, {made.frames} rows{left_out}"
        print(f"{made.out}: {size}; actions {kind}, {made.action.rotation}")
        return 0
