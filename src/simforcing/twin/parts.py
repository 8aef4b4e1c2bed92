"""Simulated views of single episodes, each kept as soon as it is finished, until they are put together.

They lie in `<out>.parts/`: `plan.json` says what they were made from, `episode-000012.npz` holds what was drawn and
`episode-000012.json`, written last, what was found; a run that was killed goes on where it stopped, and several
(`--shard`) may fill one folder. Shapes: N frames, H W picture size, n arm joints.
"""

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Bool, Float64, UInt8
from PIL import Image

from simforcing.data import ActionConvention, Dataset, Episode
from simforcing.data.episode import StateConvention
from simforcing.data.formats import survey
from simforcing.data.problems import Problems
from simforcing.data.source import assemble
from simforcing.errors import SimForcingError
from simforcing.files import partial_path, write_text
from simforcing.twin import qa
from simforcing.twin.camera import Camera
from simforcing.twin.render import KeptRenderer, masked_first_frame
from simforcing.twin.replay import Follow, JointPath, Tolerance, commanded, joint_path
from simforcing.twin.robot import Robot
from simforcing.twin.sheets import contact_sheet, motion_chart, sheet_picks


@dataclass(frozen=True)
class Job:
    """What is the same for all episodes of a run; it travels to the workers.

    dataset: its directory, `left_out` the episodes that it is opened without. robot: what `Robot.load` takes. key:
    camera of the dataset. camera: where it stands, `calibrated` or guessed; `cameras`: where each episode has its own,
    by its number (else empty); then `camera` is one of them. masked: take the first frame from the
    real one, by the masks in `arm_masks` (`episode_000012.png`, white where the arm is) or by the rendered arm.
    """

    dataset: Path
    left_out: tuple[tuple[int, str], ...]
    robot: str
    ee: str
    key: str
    camera: Camera
    cameras: Mapping[int, Camera]
    calibrated: bool
    convention: ActionConvention
    state: StateConvention
    follow: Follow
    start: Float64[np.ndarray, "4 4"] | None
    offset: Float64[np.ndarray, "4 4"] | None
    tolerance: Tolerance
    masked: bool
    arm_masks: Path | None
    skip_bad: bool
    store: Path

    def view(self, number: int) -> Camera:
        """Where the camera of an episode stands. Raises SimForcingError where each has its own and this one none."""
        if self.cameras and number not in self.cameras:
            raise SimForcingError(f"{self.dataset}: no camera file for episode {number}; calibrate it, or --skip-bad")
        return self.cameras.get(number, self.camera)


class Tools:
    """What a worker keeps open from episode to episode: dataset, robot and, once it draws, the renderer."""

    def __init__(self, job: Job, dataset: Dataset, robot: Robot) -> None:
        self.job, self.dataset, self.robot = job, dataset, robot
        self.renderer = KeptRenderer(robot, job.camera)


_kept: dict[str, Tools] = {}  # in a worker process: the tools of its job


def _tools(job: Job) -> Tools:
    """The tools of `job` in a worker process; those of an earlier job are put away."""
    key = str(job)
    if key not in _kept:
        while _kept:
            _kept.popitem()[1].renderer.close()
        dataset = assemble(survey(job.dataset, Problems(strict=not job.left_out)), dict(job.left_out))
        _kept[key] = Tools(job, dataset, Robot.load(job.robot, ee=job.ee))
    return _kept[key]


@dataclass(frozen=True)
class Found:
    """The joint path of an episode, or why it is left out."""

    path: JointPath | None
    reason: str = ""


@dataclass(frozen=True)
class Drawing:
    """An episode to draw: its number in the dataset, its path, and whether it gets a contact sheet anyway."""

    number: int
    path: JointPath
    sheet: bool


def find_in_worker(job: Job, number: int) -> Found:
    """`find` in another process."""
    return find(_tools(job), number)


def find(tools: Tools, number: int) -> Found:
    """The joint path of an episode. Raises SimForcingError for what is wrong with it, unless bad ones are skipped."""
    job = tools.job
    try:
        job.view(number)
        episode = tools.dataset[number]
        path = joint_path(
            tools.robot,
            episode,
            job.convention,
            state=job.state,
            follow=job.follow,
            start=job.start,
            offset=job.offset,
            tolerance=job.tolerance,
        )
    except SimForcingError as error:
        if not job.skip_bad:
            raise
        return Found(None, str(error))
    return Found(path)


def draw_in_worker(job: Job, drawing: Drawing) -> None:
    """`draw` in another process."""
    draw(_tools(job), drawing)


def draw(tools: Tools, drawing: Drawing) -> None:
    """Draw an episode, examine it, and keep both in the job's store. Raises SimForcingError as `find` does."""
    job, store = tools.job, Store(tools.job.store)
    episode = tools.dataset[drawing.number]
    try:
        real = episode.frames(job.key)
        size = (job.camera.height, job.camera.width)
        if real.shape[1:3] != size:
            here = f"{real.shape[1]}x{real.shape[2]}"
            raise SimForcingError(f"{episode.where}: {job.key} is {here}, others are {size[0]}x{size[1]}")
        _draw(tools, drawing, episode, real, store)
    except SimForcingError as error:
        if not job.skip_bad:
            raise
        store.skip(drawing.number, str(error))


def _draw(tools: Tools, drawing: Drawing, episode: Episode, real: UInt8[np.ndarray, "N H W 3"], store: "Store") -> None:
    job, path = tools.job, drawing.path
    renderer = tools.renderer(job.view(drawing.number))
    sim = np.stack([renderer.picture(q, o) for q, o in zip(path.q, path.opening, strict=True)])
    motions = {"real": qa.seen(real), "sim": qa.seen(sim), "arm": qa.computed(qa.arm_points(tools.robot, path))}
    command = _command_energy(job, episode)
    check = qa.examine(
        motions["real"], motions["sim"], motions["arm"], action_energy=command, calibrated=job.calibrated
    )
    if job.masked:
        arm = _arm_mask(job, drawing.number) if job.arm_masks else renderer.mask(path.q[0], float(path.opening[0]))
        sim[0] = masked_first_frame(real[0], arm)
    if drawing.sheet or set(check.flags) - {"still"}:
        masks = {i: renderer.mask(path.q[i], float(path.opening[i])) for i in sheet_picks(len(real))}
        chart = motion_chart(
            {"real": motions["real"].energy, "simulated": motions["sim"].energy, "arm": motions["arm"].energy}
            | ({} if command is None else {"commanded": command})
        )
        store.save_sheet(drawing.number, contact_sheet(real, sim, masks), chart)
    own = {"camera": renderer.camera.to_dict()} if job.cameras else {}
    store.save(drawing.number, {**path.summary(), **check.to_dict(), **own}, sim, path, motions)


def _command_energy(job: Job, episode: Episode) -> Float64[np.ndarray, " M"] | None:
    """Metres that the action commands from frame to frame; None where the actions are no poses."""
    try:
        targets = commanded(episode, job.convention, job.state, job.start)
    except SimForcingError:
        return None  # a path that follows the states needs no actions
    return np.asarray(np.linalg.norm(np.diff(targets[:, :3, 3], axis=0), axis=1))


def _arm_mask(job: Job, number: int) -> Bool[np.ndarray, "H W"]:
    assert job.arm_masks is not None
    file = job.arm_masks / f"{_name(number)}.png"
    try:
        with Image.open(file) as picture:
            return np.asarray(np.array(picture.convert("L")) > 127)
    except OSError as error:
        raise SimForcingError(f"arm mask {file}: cannot be read ({error}); make it, white where the arm is") from error


def _name(number: int) -> str:
    return f"episode_{number:06d}"


@dataclass(frozen=True)
class Part:
    """A finished episode: what was found, the simulated view, the joint path, and its motions."""

    summary: dict[str, Any]
    sim: UInt8[np.ndarray, "N H W 3"]
    path: JointPath


class Store:
    """The folder of finished episodes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Make the folder, or go on in one of the same plan. Raises SimForcingError naming what differs."""
        file = self.root / "plan.json"
        if not file.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(plan, indent=1) + "\n")
            return
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise SimForcingError(f"{file}: cannot be read ({error}); delete {self.root} to begin anew") from error
        different = sorted(key for key in {*plan, *before} if plan.get(key) != before.get(key))
        if different:
            raise SimForcingError(
                f"{self.root}: begun with another {', '.join(different)}; give the same to go on, or delete it to "
                "begin anew"
            )

    @contextmanager
    def lock(self, shard: str | None) -> Iterator[None]:
        """Keeps off a second run of the same shard, and shards while a whole run puts together.

        Raises SimForcingError where that is the case.
        """
        with ExitStack() as open_files:
            for name, exclusive in [("all", shard is None)] + ([] if shard is None else [(shard, True)]):
                handle = open_files.enter_context((self.root / f"lock-{name}").open("ab"))
                _hold(handle, exclusive, self.root)
            yield

    def done(self) -> set[int]:
        """Numbers of the episodes that are finished or left out."""
        return {int(path.stem.removeprefix("episode_")) for path in self.root.glob("episode_*.json")}

    def summary(self, number: int) -> dict[str, Any]:
        """What was found about a finished episode; `skipped` has the reason where it was left out."""
        stored: dict[str, Any] = json.loads((self.root / f"{_name(number)}.json").read_text(encoding="utf-8"))
        return stored

    def skip(self, number: int, reason: str) -> None:
        """Note that an episode is left out."""
        write_text(self.root / f"{_name(number)}.json", json.dumps({"source": number, "skipped": reason}) + "\n")

    def save(
        self,
        number: int,
        summary: Mapping[str, Any],
        sim: UInt8[np.ndarray, "N H W 3"],
        path: JointPath,
        motions: Mapping[str, qa.Motion],
    ) -> None:
        """Keep a finished episode; it counts as finished once this is over."""
        target = self.root / f"{_name(number)}.npz"
        partial = partial_path(target)
        arrays: dict[str, Any] = {"sim": sim, "stride": motions["real"].stride}
        arrays |= {f"path_{name}": value for name, value in vars(path).items()}
        for name, motion in motions.items():
            arrays |= {f"{name}_unlikeness": motion.unlikeness.astype(np.float16), f"{name}_energy": motion.energy}
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(partial, target)
        write_text(self.root / f"{_name(number)}.json", json.dumps({"source": number, **summary}) + "\n")

    def load(self, number: int) -> Part:
        """A finished episode. Raises SimForcingError for a damaged one."""
        with self._open(number) as stored:
            path = JointPath(**{name: stored[f"path_{name}"] for name in JointPath.__dataclass_fields__})
            return Part(self.summary(number), stored["sim"], path)

    def motion(self, number: int, name: str) -> qa.Motion:
        """The motion `real`, `sim` or `arm` of a finished episode, without where in the picture it was."""
        with self._open(number) as stored:
            unlike = stored[f"{name}_unlikeness"].astype(np.float32)
            return qa.Motion(stored[f"{name}_energy"], unlike, int(stored["stride"]))

    @contextmanager
    def _open(self, number: int) -> Iterator[Any]:
        file = self.root / f"{_name(number)}.npz"
        try:
            with np.load(file, allow_pickle=False) as stored:
                yield stored
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise SimForcingError(
                f"{file}: damaged ({error}); delete it and the .json beside it, and run the same command again"
            ) from error

    def save_sheet(self, number: int, *pictures: UInt8[np.ndarray, "h w 3"]) -> None:
        """Keep the contact sheet of an episode: pictures below one another."""
        width = max(picture.shape[1] for picture in pictures)
        padded = [np.pad(p, ((0, 0), (0, width - p.shape[1]), (0, 0)), constant_values=255) for p in pictures]
        Image.fromarray(np.concatenate(padded)).save(self.root / f"{_name(number)}.png")

    def sheet(self, number: int) -> Path | None:
        """The contact sheet of an episode, where it has one."""
        file = self.root / f"{_name(number)}.png"
        return file if file.exists() else None

    def remove(self, *, unless_used: bool = False) -> None:
        """Delete the folder; with `unless_used` only while no episode is finished."""
        if not (unless_used and self.done()):
            shutil.rmtree(self.root, ignore_errors=True)


def _hold(handle: BinaryIO, exclusive: bool, where: Path) -> None:
    """Lock an open file until it is closed, or its process ends, however it does."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SimForcingError(f"{where}: another run works on it; wait for its end, or stop it") from None
    except OSError:
        pass  # a file system without locks
