"""A dataset of real episodes -> a paired dataset: each frame of one camera beside its arm-only view.

The joint paths of all episodes are found first, so that bad input ends before anything is drawn. Episodes are
drawn one by one, each kept when it is finished (`parts.py`), and put together at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Float64

from simforcing.data import REAL, SIM, ActionConvention, Dataset, Episode, LeRobotWriter
from simforcing.data.actions import from_poses, names
from simforcing.data.audit import open_checked
from simforcing.data.cache import source_hash
from simforcing.data.episode import Gripper, Rotation, StateConvention, nearest
from simforcing.errors import SimForcingError
from simforcing.files import check_new
from simforcing.twin import qa
from simforcing.twin.camera import Camera, default_camera
from simforcing.twin.parallel import Engine, Workers
from simforcing.twin.parts import Drawing, Found, Job, Part, Store, Tools, draw, draw_in_worker, find, find_in_worker
from simforcing.twin.replay import Follow, Tolerance, commanded, infer_gripper, openings, state_convention
from simforcing.twin.robot import BUNDLED, Robot
from simforcing.twin.sheets import page

_WRIST = ("wrist", "hand", "gripper", "tcp")
_NEIGHBOURS = 50  # episodes to either side among which a better partner is looked for
_SURE = 0.7  # agreement from which on no better partner is looked for

Report = Callable[[str, int, int], None]
"""Called with a stage (`replay`, `render`, `write`), the number of episodes done, and of all."""


@dataclass(frozen=True)
class Conventions:
    """What the dataset does not say itself; `auto` reads it from the dataset (see `resolve`)."""

    gripper: Literal["auto", "open_positive", "closed_positive"] = "auto"
    rotation: Literal["auto"] | Rotation = "auto"

    def resolve(self, dataset: Dataset) -> tuple[ActionConvention, StateConvention, list[str]]:
        """The conventions of actions and states, and one line for each thing that was inferred.

        `auto` takes what the dataset's format or `meta/simforcing.json` says. In other LeRobot datasets rotations
        are Euler angles where names say roll, pitch, yaw, and the gripper counts as open where episodes usually
        start.
        """
        convention, found_notes = dataset.action_convention, []
        state = state_convention(dataset, convention)
        if self.rotation != "auto":
            convention, state = replace(convention, rotation=self.rotation), replace(state, rotation=self.rotation)
        if self.gripper != "auto":
            convention, state = _signed(convention, state, self.gripper)
        elif "action" not in dataset.meta and not _says_gripper(dataset):
            found = infer_gripper(dataset)
            sign = found or convention.gripper
            convention, state = _signed(convention, state, sign)
            why = "most episodes start so when open" if found else "not clear from the data; assumed"
            found_notes.append(f"gripper: {sign} ({why}); --gripper says otherwise")
        return convention, state, found_notes


def _signed(
    convention: ActionConvention, state: StateConvention, gripper: Gripper
) -> tuple[ActionConvention, StateConvention]:
    """Both with this end of the gripper open; of two fingers there is no question."""
    return replace(convention, gripper=gripper), state if state.fingers else replace(state, gripper=gripper)


def _says_gripper(dataset: Dataset) -> bool:
    """Whether the format itself settles which end of the gripper is open; LeRobot's does not."""
    return bool(dataset.format) and not dataset.format.startswith("LeRobot")


@dataclass(frozen=True)
class PairResult:
    """What `pair` made. skipped: (episode, reason). flagged: (episode, reasons) of pairs that QA doubts. notes: what
    was inferred from the data. left: episodes that are still to be drawn, by other shards; then `out` is not there
    yet and the finished episodes are in `parts`.
    """

    out: Path
    parts: Path
    episodes: int
    frames: int
    skipped: tuple[tuple[int, str], ...]
    flagged: tuple[tuple[int, str], ...]
    worst_position: float  # metres
    notes: tuple[str, ...]
    left: int = 0


def choose_camera(dataset: Dataset, key: str | None = None) -> str:
    """The real camera: `key`, else the first that is no wrist camera.

    The part after `observation.images.` is enough. Raises SimForcingError for an unknown key and a dataset
    without pictures.
    """
    real = [name for name in dataset.cameras if name != SIM]
    if not real:
        raise SimForcingError(f"{dataset.root}: no camera in it; pairs need real pictures")
    if key is None:
        outside = [name for name in real if not any(word in name.lower() for word in _WRIST)]
        return (outside or real)[0]
    full = f"observation.images.{key.removeprefix('observation.images.')}"
    for name in (key, full):
        if name in real:
            return name
    raise SimForcingError(f"{dataset.root}: no camera {key!r}; {nearest(full, real)}")


def pair(
    dataset: Dataset | Path | str,
    out: Path | str,
    robot: Robot,
    *,
    camera: Camera | Mapping[int, Camera] | None = None,
    camera_key: str | None = None,
    follow: Follow = "state",
    conventions: Conventions | None = None,
    start: Float64[np.ndarray, "4 4"] | None = None,
    offset: Float64[np.ndarray, "4 4"] | None = None,
    tolerance: Tolerance | None = None,
    first_frame: Literal["rendered", "masked"] = "rendered",
    arm_masks: Path | None = None,
    skip_bad: bool = False,
    episodes: Sequence[int] | None = None,
    qa_episodes: int = 3,
    workers: int = 1,
    engine: Engine = "processes",
    shard: tuple[int, int] | None = None,
    report: Report | None = None,
) -> PairResult:
    """Write the paired LeRobot v3.0 dataset `out`: real frames of one camera, and the arm alone beside them.

    camera: where it stands, or where in each episode, by its number (default: what the dataset says under `cameras`,
    else `default_camera`, a guess). camera_key:
    see `choose_camera`. follow, start, offset, tolerance: see `joint_path`. first_frame: `masked` takes frame 0 of the
    simulated view from the real one, by `arm_masks` or the calibrated camera. episodes: numbers to take (default all).
    qa_episodes: how many get a contact sheet in `qa/`, besides those that are flagged. workers, engine: see `Workers`.
    shard: (i, n) draws the i-th of n parts only (from 1); a run without it draws what is missing and puts everything
    together.

    State, action and task are kept; camera, robot, conventions, errors and QA go to `meta/simforcing.json`, numbers of
    every frame to `qa/frames.parquet`, the page for people is `qa/index.html`. A run that ends early leaves finished
    episodes in `<out>.parts`, and the same call goes on from there.

    Raises SimForcingError for an existing `out`, a damaged dataset and poses out of reach (unless `skip_bad`, which
    counts and lists them), a camera of another shape, and a machine without renderer.
    """
    target = Path(out)
    _check(target, dataset.root if isinstance(dataset, Dataset) else Path(dataset), shard, qa_episodes)
    data = dataset if isinstance(dataset, Dataset) else open_checked(dataset, skip_bad=skip_bad, video=False)
    crew = Workers(workers, engine)
    if not crew.here and (isinstance(dataset, Dataset) or robot.origin is None):
        raise SimForcingError("several workers need dataset and robot as paths, which they can open themselves")
    numbers = _numbers(data, episodes)
    convention, state, notes = (conventions or Conventions()).resolve(data)
    key = choose_camera(data, camera_key)
    known = stored_camera(data, key) if camera is None else camera
    if first_frame == "masked" and known is None and arm_masks is None:
        raise SimForcingError("a masked first frame needs a camera file that fits, or arm masks")
    view, views = _view(data, robot, known, key, numbers)
    store = Store(target.with_name(f"{target.name}.parts").resolve())
    job = Job(
        dataset=data.root.resolve(),
        left_out=data.skipped,
        robot=robot.origin or "",
        ee=robot.ee_name,
        key=key,
        camera=view,
        cameras=views,
        calibrated=known is not None,
        convention=convention,
        state=state,
        follow=follow,
        start=start,
        offset=offset,
        tolerance=tolerance or Tolerance(),
        masked=first_frame == "masked",
        arm_masks=None if arm_masks is None else arm_masks.resolve(),
        skip_bad=skip_bad,
        store=store.root,
    )
    run = _Run(data, robot, job, store, crew, numbers, qa_episodes, report or (lambda stage, done, total: None))
    return run.carry_out(target, shard, notes)


def _check(target: Path, source: Path, shard: tuple[int, int] | None, qa_episodes: int) -> None:
    check_new(target, source)
    if qa_episodes < 0:
        raise SimForcingError(f"{qa_episodes} episodes with a contact sheet: give 0 or more")
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise SimForcingError(f"shard {shard[0]}/{shard[1]}: give i/n with i from 1 to n")


def stored_camera(data: Dataset, key: str) -> Camera | None:
    """Where a dataset says that its camera stands; None where it does not."""
    stored = data.meta.get("cameras", {})
    if not isinstance(stored, dict):
        raise SimForcingError(f"{data.root}: cameras in its meta must be a table of camera and where it stands")
    for name in stored:
        if name not in data.cameras:
            raise SimForcingError(f"{data.root}: its meta knows of a camera {name!r}; {nearest(name, data.cameras)}")
    if key not in stored:
        return None
    try:
        return Camera.from_dict(stored[key])
    except SimForcingError as error:
        raise SimForcingError(f"{data.root}: {key}: {error}") from error


def _view(
    data: Dataset, robot: Robot, camera: Camera | Mapping[int, Camera] | None, key: str, numbers: Sequence[int]
) -> tuple[Camera, dict[int, Camera]]:
    """Where the camera stands, and where in each episode if it moves, as large as its pictures."""
    height, width = data[numbers[0]].frames(key, [0]).shape[1:3]
    if not isinstance(camera, Mapping):
        return (camera or default_camera(robot, width, height)).resized(height, width), {}
    views = {number: camera[number].resized(height, width) for number in numbers if number in camera}
    if not views:
        raise SimForcingError(
            f"{data.root}: none of the cameras is of one of its episodes {numbers[0]} to {numbers[-1]}"
        )
    return next(iter(views.values())), views


def _numbers(data: Dataset, episodes: Sequence[int] | None) -> list[int]:
    numbers = list(range(len(data))) if episodes is None else list(episodes)
    for number in numbers:
        if not 0 <= number < len(data):
            raise SimForcingError(f"{data.root}: no episode {number}; it has 0 to {len(data) - 1}")
    if not numbers:
        raise SimForcingError(f"{data.root}: no episodes to pair")
    return numbers


def _plan(data: Dataset, robot: Robot, job: Job, numbers: Sequence[int]) -> dict[str, Any]:
    """What must be the same for a run to go on: everything that a drawn episode depends on."""
    return {
        "dataset": [source_hash(data.root), list(numbers)],
        "arm masks": None if job.arm_masks is None else source_hash(job.arm_masks),
        "robot": [robot.name, robot.sha256, robot.ee_name],
        "camera": {"key": job.key, "calibrated": job.calibrated, **job.camera.to_dict()},
        "cameras": {str(number): camera.to_dict() for number, camera in job.cameras.items()},
        "conventions": [job.convention.to_dict(), job.state.to_dict()],
        "follow": job.follow,
        "start pose": None if job.start is None else job.start.tolist(),
        "tool offset": None if job.offset is None else job.offset.tolist(),
        "tolerance": [job.tolerance.position, job.tolerance.rotation],
        "first frame": "masked" if job.masked else "rendered",
    }


@dataclass
class _Run:
    """One run of `pair` on its store."""

    data: Dataset
    robot: Robot
    job: Job
    store: Store
    crew: Workers
    numbers: Sequence[int]
    qa_episodes: int
    tell: Report

    def carry_out(self, target: Path, shard: tuple[int, int] | None, notes: Sequence[str]) -> PairResult:
        """Draw what is missing, or the share of a shard; without a shard, put everything together."""
        self.store.begin(_plan(self.data, self.robot, self.job, self.numbers))
        try:
            with self.store.lock(None if shard is None else f"{shard[0]}-of-{shard[1]}"):
                self.draw(self.numbers if shard is None else self.numbers[shard[0] - 1 :: shard[1]])
                if shard is None:
                    self.assemble(target)
                made = self.result(target, notes)
                if shard is None:
                    self.store.remove()
                return made
        finally:
            self.store.remove(unless_used=True)

    def draw(self, share: Sequence[int]) -> None:
        """Find and draw the episodes of `share` that are not finished; those that were left out are tried again."""
        done = self.store.done()
        finished = {number for number in done if "skipped" not in self.store.summary(number)}
        todo = [number for number in share if number not in finished]
        if not todo:
            return
        sheets = set(self.numbers[: self.qa_episodes])
        tools = Tools(self.job, self.data, self.robot)
        here = self.crew.here
        try:
            with self.crew as crew:
                found: dict[int, Found] = {}
                for number, answer in crew.each(
                    partial(find, tools) if here else partial(find_in_worker, self.job), todo
                ):
                    found[number] = answer
                    self.tell("replay", len(found), len(todo))
                drawings = []
                for number in todo:
                    path, reason = found[number].path, found[number].reason
                    if path is None:
                        self.store.skip(number, reason)
                    else:
                        drawings.append(Drawing(number, path, number in sheets))
                work = partial(draw, tools) if here else partial(draw_in_worker, self.job)
                for count, _ in enumerate(crew.each(work, drawings), start=1):
                    self.tell("render", count, len(drawings))
        finally:
            tools.renderer.close()

    def rows(self) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        """Summaries of the finished episodes in order, and what was left out with reasons."""
        done = self.store.done()
        rows = [self.store.summary(number) for number in self.numbers if number in done]
        skipped = [(int(row["source"]), str(row["skipped"])) for row in rows if "skipped" in row]
        return [row for row in rows if "skipped" not in row], sorted([*self.data.skipped, *skipped])

    def result(self, target: Path, notes: Sequence[str]) -> PairResult:
        """The outcome so far."""
        rows, skipped = self.rows()
        return PairResult(
            out=target,
            parts=self.store.root,
            episodes=len(rows),
            frames=sum(int(row["frames"]) for row in rows),
            skipped=tuple(skipped),
            flagged=tuple((int(r["source"]), "; ".join(r["reasons"])) for r in rows if set(r["flags"]) - {"still"}),
            worst_position=max((float(row["position_error_mm"]) for row in rows), default=0.0) / 1000,
            notes=tuple(notes),
            left=len(self.numbers) - len(self.store.done() & set(self.numbers)),
        )

    def assemble(self, target: Path) -> None:
        """Write the dataset, its QA pictures and page from the finished episodes."""
        rows, skipped = self.rows()
        if not rows:
            raise SimForcingError(
                f"{self.data.root}: all {len(skipped)} episodes are out of reach or damaged; the first: {skipped[0][1]}"
            )
        find_swapped(self.store, rows)
        size = (self.job.camera.height, self.job.camera.width)
        stateless = not self.data[rows[0]["source"]].state.shape[-1]
        writing = LeRobotWriter(
            target,
            fps=self.data.fps,
            robot=self.data.robot,
            cameras={REAL: size, SIM: size},
            state_names=names(self.job.state) if stateless else _names_or_numbers(self.data, "state"),
            action_names=_names_or_numbers(self.data, "action"),
            meta=self.meta(rows, skipped),
        )
        with writing as writer:
            tables = []
            for done, row in enumerate(rows, start=1):
                episode, part = self.data[row["source"]], self.store.load(row["source"])
                state = self._computed_state(episode) if stateless else episode.state
                writer.add_episode(
                    {REAL: episode.frames(self.job.key), SIM: part.sim}, state, episode.action, episode.task
                )
                tables.append(_frames_table(done - 1, part))
                self.tell("write", done, len(rows))
            self._write_qa(writer.partial / "qa", rows, skipped, pa.concat_tables(tables))

    def _computed_state(self, episode: Episode) -> Float32[np.ndarray, "N W"]:
        """States for data that have none: where the actions lead."""
        poses = commanded(episode, self.job.convention, self.job.state, self.job.start)
        gripper = np.concatenate([np.ones(1), openings(episode.action[:-1, -1], self.job.convention)])
        return from_poses(poses, gripper, self.job.state)

    def meta(self, rows: Sequence[Mapping[str, Any]], skipped: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """Content of `meta/simforcing.json`."""
        job, robot = self.job, self.robot
        source = "a file an episode" if job.cameras else "known" if job.calibrated else "default guess"
        return {
            "action": job.convention.to_dict(),
            "state": job.state.to_dict(),
            "robot": {"name": robot.name, "sha256": robot.sha256, "end_effector": robot.ee_name}
            | {"bundled": robot.origin in BUNDLED},
            "camera": {"key": job.key, "source": source, **job.camera.to_dict()},
            **({"cameras": {REAL: job.camera.to_dict()}} if source == "known" else {}),
            "source": {"dataset": self.data.root.name, "follow": job.follow, "state_rotation": job.state.rotation},
            "tool_offset": None if job.offset is None else job.offset.tolist(),
            "first_frame": "masked" if job.masked else "rendered",
            "episodes": list(rows),
            "skipped": [{"source": number, "reason": reason} for number, reason in skipped],
        }

    def _write_qa(
        self, folder: Path, rows: Sequence[Mapping[str, Any]], skipped: Sequence[tuple[int, str]], frames: pa.Table
    ) -> None:
        folder.mkdir()
        pq.write_table(frames, folder / "frames.parquet")
        pictures = {}
        for i, row in enumerate(rows):
            sheet = self.store.sheet(row["source"])
            if sheet is not None:
                copy = folder / f"episode_{i:06d}.png"
                copy.write_bytes(sheet.read_bytes())
                pictures[f"episode {i}: real, simulated, simulated arm over the real picture; motion"] = copy
        columns = ("episode", "source", "frames", *_SHOWN.values(), "doubts")
        cells = [
            ([i, r["source"], r["frames"], *(r[key] for key in _SHOWN), "; ".join(r["reasons"])], bool(r["flags"]))
            for i, r in enumerate(rows)
        ]
        doubted = sum(bool(set(row["flags"]) - {"still"}) for row in rows)
        lines = [
            f"{len(rows)} episodes of {self.data.root.name}, {sum(r['frames'] for r in rows)} frames, "
            f"{self.robot.name} by '{self.robot.ee_name}'; {doubted} doubtful, {len(skipped)} left out.",
            _HOW_TO_READ if self.job.calibrated else f"{_HOW_TO_READ} {_GUESSED}",
            *(f"Left out: {reason}" for _, reason in skipped),
        ]
        (folder / "index.html").write_text(page("Pairs", lines, columns, cells, pictures), encoding="utf-8")


_SHOWN = {
    "motion_agreement": "agreement",
    "motion_overlap": "overlap",
    "lag_action_sim": "lag action, sim",
    "lag_sim_real": "lag sim, real",
    "position_error_mm": "miss (mm)",
    "rotation_error_degrees": "miss (degrees)",
    "frames_beyond_limits": "frames beyond limits",
}
_HOW_TO_READ = (
    "Agreement: correlation of how the moments of real and simulated motion differ from each other; near 0 for "
    "motions that have nothing in common. Lags in frames; positive: the second is later; an action with lag 0 is "
    "reached at the next frame. Miss: largest distance of the simulated end effector from where the data have it."
)
_GUESSED = (
    "The camera is a guess: views move alike but do not lie on each other, so there is no overlap, and mirrored pairs "
    "are found only where the motion to the sides is clear."
)


def _names_or_numbers(data: Dataset, what: Literal["state", "action"]) -> tuple[str, ...]:
    """Names of the columns; numbered where the dataset has none."""
    named, width = getattr(data, f"{what}_names"), getattr(data[0], what).shape[-1]
    return tuple(named) if len(named) == width else tuple(f"{what}_{i}" for i in range(width))


def _frames_table(episode: int, part: Part) -> pa.Table:
    """One row a frame: how well its pose was reached, and what moves from it to the next frame."""
    path = part.path
    columns = {
        "episode": np.full(len(path.q), episode),
        "frame": np.arange(len(path.q)),
        "position_error_mm": 1e3 * path.position_error,
        "rotation_error_degrees": np.degrees(path.rotation_error),
        "converged": path.converged,
        "at_limit": path.at_limit,
        "beyond_limits": path.beyond_limits,
    }
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def find_swapped(store: Store, rows: Sequence[dict[str, Any]], thresholds: qa.Thresholds = qa.Thresholds()) -> None:
    """Flag (`swapped`, in `rows`) episodes whose real motion agrees with another episode's simulation instead.

    Pairs that are doubtful anyway, and unsuspicious ones whose better partner prefers another, too: by chance alone
    some motion always agrees better than a pair that the camera sees badly.
    """
    suspects = [i for i, row in enumerate(rows) if row["motion_agreement"] < _SURE and "still" not in row["flags"]]
    found = {i: _better_partner(store, rows, i, thresholds) for i in suspects}
    for i, better in found.items():
        if better is not None and (rows[i]["flags"] or found.get(better[0]) is not None):
            partner, agreement = better
            own = rows[i]["motion_agreement"]
            reason = (
                f"agrees better with the simulation of episode {partner} ({agreement:.2f}) than its own ({own:.2f})"
            )
            rows[i]["flags"] = [*rows[i]["flags"], "swapped"]
            rows[i]["reasons"] = [*rows[i]["reasons"], reason]


def _better_partner(
    store: Store, rows: Sequence[Mapping[str, Any]], i: int, thresholds: qa.Thresholds
) -> tuple[int, float] | None:
    """The neighbour with whose simulation the real motion of episode `i` agrees clearly better, and how much."""
    real, frames = store.motion(rows[i]["source"], "real"), rows[i]["frames"]
    best, partner = -1.0, i
    for j in range(max(0, i - _NEIGHBOURS), min(len(rows), i + _NEIGHBOURS + 1)):
        if j == i or abs(rows[j]["frames"] - frames) > 0.5 * frames:
            continue
        agreement = max(qa.agreement(real, store.motion(rows[j]["source"], name)) for name in ("sim", "arm"))
        if agreement > best:
            best, partner = agreement, j
    needed = max(rows[i]["motion_agreement"] + thresholds.better, thresholds.plain)
    return (partner, best) if best > needed else None
