"""A paired dataset -> a dataset of simulated rollouts on augmented trajectories (`rollouts.py`), for the teacher."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from simforcing.data import SIM, Dataset, LeRobotWriter, open_dataset
from simforcing.errors import SimForcingError
from simforcing.files import check_new
from simforcing.twin.camera import Camera
from simforcing.twin.coverage import Coverage
from simforcing.twin.parallel import Workers
from simforcing.twin.playground import WorldConfig
from simforcing.twin.replay import state_convention
from simforcing.twin.robot import Robot
from simforcing.twin.rollouts import Limits, Maker, Rollout, RolloutConfig, RolloutJob, find_limits
from simforcing.twin.sheets import page, sheet_picks

_SHOWN = 12  # rollouts on the contact sheet

Report = Callable[[int, int], None]
"""Called with the number of source episodes done, and of all."""


@dataclass(frozen=True)
class AugmentResult:
    """What `augment` made. given_up: rollouts for which no motion was found that the arm can make."""

    out: Path
    episodes: int
    frames: int
    kinds: dict[str, int]
    given_up: int
    coverage: dict[str, Any]
    notes: tuple[str, ...]


_kept: dict[str, Maker] = {}  # in a worker process


def _make_in_worker(job: RolloutJob, episode: int) -> list[Rollout | None]:
    key = str(job)
    if key not in _kept:
        while _kept:
            _kept.popitem()[1].renderer.close()
        _kept[key] = Maker(job, open_dataset(job.pairs), Robot.load(job.robot, ee=job.ee))
    return _make(_kept[key], episode)


def _make(maker: Maker, episode: int) -> list[Rollout | None]:
    return [maker.make(episode, number) for number in range(maker.job.per_episode)]


def augment(
    pairs: Path | str,
    out: Path | str,
    *,
    per_episode: int,
    seed: int = 0,
    robot: Robot | None = None,
    config: RolloutConfig = RolloutConfig(),
    episodes: Sequence[int] | None = None,
    workers: int = 1,
    report: Report | None = None,
) -> AugmentResult:
    """Write the LeRobot v3.0 dataset `out` of simulated rollouts (camera SIM alone): `per_episode` of each episode.

    pairs: what `pair` made, or pairs of the bundled world. robot: the model that they were made with; not needed for
    bundled and Menagerie models. episodes: the sources (default all). The same pairs, seed and config give the same
    bytes, whatever the number of workers. `qa/` shows the coverage of states and actions before and after, numbers in
    `qa/coverage.json`.

    Raises SimForcingError for pairs without robot or camera, another robot than theirs, an existing `out`, numbers
    that are not positive, and where no rollout at all works out.
    """
    target = Path(out)
    check_new(target, Path(pairs))
    if per_episode < 1 or seed < 0:
        raise SimForcingError(f"per_episode={per_episode}, seed={seed}: give at least 1 rollout, and no negative seed")
    data = open_dataset(pairs)
    chosen = list(range(len(data))) if episodes is None else list(episodes)
    if not chosen or not all(0 <= number < len(data) for number in chosen):
        raise SimForcingError(f"{data.root}: episodes {chosen} are not all there; it has 0 to {len(data) - 1}")
    arm, notes = _robot(data, robot)
    job = _job(data, arm, config, per_episode, seed)
    crew = Workers(workers)
    if not crew.here and arm.origin is None:
        raise SimForcingError("several workers need the robot as a path, which they can open themselves")
    maker = Maker(job, data, arm)
    maker.job = job = replace(job, limits=find_limits(maker, data.meta.get("source", {}).get("follow") == "action"))
    writing = _Writing(maker, target, chosen, report or (lambda done, total: None))
    try:
        with crew:
            work = partial(_make, maker) if crew.here else partial(_make_in_worker, job)
            return writing.write(crew.each(work, chosen), notes)
    finally:
        maker.renderer.close()


def _robot(data: Dataset, given: Robot | None) -> tuple[Robot, list[str]]:
    """The robot of the pairs: the one that is given, which must be theirs, or by its name."""
    stored = data.meta.get("robot")
    if not isinstance(stored, dict) or "camera" not in data.meta:
        raise SimForcingError(f"{data.root}: does not say robot and camera; give what 'simforcing twin pair' made")
    name, digest = str(stored["name"]), stored.get("sha256")
    if given is None:
        try:
            given = Robot.load(name, ee=stored["end_effector"])
        except SimForcingError as error:
            raise SimForcingError(f"{data.root}: made with '{name}'; name its model with --robot ({error})") from error
    elif given.ee_name != stored["end_effector"]:
        raise SimForcingError(
            f"{data.root}: made with the frame '{stored['end_effector']}', not '{given.ee_name}'; give it with --ee"
        )
    if digest == given.sha256 or (digest is None and given.name == name):
        return given, []
    if stored.get("bundled") and given.origin == name:
        return given, [f"robot: the bundled {name} has changed since the pairs were made"]
    raise SimForcingError(
        f"{data.root}: made with '{name}', and {given.source} is another model; give that one with --robot"
    )


def _job(data: Dataset, arm: Robot, config: RolloutConfig, per_episode: int, seed: int) -> RolloutJob:
    stored = data.meta["camera"]
    camera = Camera.from_dict({key: value for key, value in stored.items() if key not in ("key", "source")})
    offset = data.meta.get("tool_offset")
    world = data.meta.get("world")
    return RolloutJob(
        pairs=data.root.resolve(),
        robot=arm.origin or "",
        ee=arm.ee_name,
        convention=data.action_convention,
        state=state_convention(data, data.action_convention),
        offset=None if offset is None else np.array(offset, dtype=np.float64),
        camera=camera,
        cameras={
            i: Camera.from_dict(row["camera"]) for i, row in enumerate(data.meta.get("episodes", ())) if "camera" in row
        },
        config=config,
        per_episode=per_episode,
        seed=seed,
        world=None if world is None else WorldConfig.from_dict(world["config"]),
    )


@dataclass
class _Writing:
    """Writes the rollouts in the order of their sources, whatever the order in which they are made."""

    maker: Maker
    target: Path
    sources: Sequence[int]
    tell: Report
    made: list[dict[str, Any]] = field(default_factory=list)
    given_up: list[dict[str, int]] = field(default_factory=list)
    strips: list[UInt8[np.ndarray, "H w 3"]] = field(default_factory=list)

    def write(self, results: Iterable[tuple[int, list[Rollout | None]]], notes: Sequence[str]) -> AugmentResult:
        """Make the dataset. Raises SimForcingError where nothing at all works out."""
        data, job = self.maker.data, self.maker.job
        coverage = Coverage(data.state_names, data.action_names)
        for number in self.sources:
            coverage.add_before(data[number].state, data[number].action)
        writing = LeRobotWriter(
            self.target,
            fps=data.fps,
            robot=data.robot,
            cameras={SIM: (job.camera.height, job.camera.width)},
            state_names=data.state_names,
            action_names=data.action_names,
            meta=self._meta(),
        )
        with writing as writer:
            for number, rollouts in self._in_order(results):
                for k, rollout in enumerate(rollouts):
                    if rollout is None:
                        self.given_up.append({"source": number, "number": k})
                        continue
                    writer.add_episode({SIM: rollout.sim}, rollout.state, rollout.action, rollout.task)
                    coverage.add_after(rollout.state, rollout.action)
                    self._note(number, rollout)
            if not self.made:
                raise SimForcingError(
                    f"{data.root}: no augmented motion out of {len(self.given_up)} is one that the arm can make; "
                    "augment less"
                )
            writer.meta["augmentation"] |= {"rollouts": self.made, "given_up": self.given_up}
            self._write_qa(writer.partial / "qa", coverage)
        kinds = Counter(str(row["kind"]) for row in self.made)
        frames = sum(int(row["frames"]) for row in self.made)
        numbers = coverage.numbers()
        return AugmentResult(
            self.target, len(self.made), frames, dict(kinds), len(self.given_up), numbers, tuple(notes)
        )

    def _in_order(
        self, results: Iterable[tuple[int, list[Rollout | None]]]
    ) -> Iterable[tuple[int, list[Rollout | None]]]:
        early: dict[int, list[Rollout | None]] = {}
        waiting = list(self.sources)
        for number, rollouts in results:
            early[number] = rollouts
            while waiting and waiting[0] in early:
                first = waiting.pop(0)
                yield first, early.pop(first)
                self.tell(len(self.sources) - len(waiting), len(self.sources))

    def _note(self, source: int, rollout: Rollout) -> None:
        self.made.append(
            {
                "source": source,
                "kind": rollout.kind,
                "frames": len(rollout.state),
                "attempts": rollout.attempts,
                "lowest_mm": round(1e3 * rollout.lowest, 1),
            }
        )
        if len(self.strips) < _SHOWN:
            self.strips.append(np.concatenate(list(rollout.sim[sheet_picks(len(rollout.sim))]), axis=1))

    def _meta(self) -> dict[str, Any]:
        data, job = self.maker.data, self.maker.job
        assert job.limits is not None
        kept: dict[str, Any] = {key: data.meta[key] for key in ("robot", "camera", "tool_offset") if key in data.meta}
        world = {} if "world" not in data.meta else {"world": {**data.meta["world"], "augmented": True}}
        return {
            "action": job.convention.to_dict(),
            "state": job.state.to_dict(),
            **kept,
            **world,
            "source": {"dataset": data.root.name, "augmented": True},
            "augmentation": {
                "seed": job.seed,
                "per_episode": job.per_episode,
                "config": asdict(job.config),
                "limits": asdict(job.limits),
            },
        }

    def _write_qa(self, folder: Path, coverage: Coverage) -> None:
        folder.mkdir()
        pictures = coverage.write(folder)
        width = max(strip.shape[1] for strip in self.strips)
        padded = [np.pad(s, ((0, 2), (0, width - s.shape[1]), (0, 0)), constant_values=255) for s in self.strips]
        Image.fromarray(np.concatenate(padded)).save(folder / "rollouts.png")
        limits = self.maker.job.limits
        assert limits is not None
        kinds = Counter(row["kind"] for row in self.made)
        lines = [
            f"{len(self.made)} rollouts ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}) of "
            f"{len(self.sources)} episodes of {self.maker.data.root.name}; {len(self.given_up)} given up.",
            _said(limits),
            "Coverage: share of 20 bins over the range of both that is filled before (recorded) and after (recorded "
            "and simulated). Places: cubes of 5 cm that the end effector visits.",
        ]
        columns, rows = coverage.table()
        (folder / "index.html").write_text(
            page("Augmented rollouts", lines, columns, rows, {**pictures, "rollouts": folder / "rollouts.png"}),
            encoding="utf-8",
        )


def _said(limits: Limits) -> str:
    box = ", ".join(f"{100 * a:.0f} to {100 * b:.0f}" for a, b in zip(limits.lower, limits.upper, strict=True))
    return (
        f"Kept to: x, y, z in {box} cm; nothing below {100 * limits.table:.1f} cm; at most {100 * limits.step:.1f} cm, "
        f"{np.degrees(limits.turn):.0f} degrees and {np.degrees(limits.joint_step):.0f} degrees of a joint a frame. "
        f"An action leads to the pose {limits.lead:.1f} frames later."
    )
