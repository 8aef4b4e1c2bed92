"""Demonstrations of LIBERO tasks by the scripted expert, as a LeRobot v3.0 dataset.

Legend: N steps, H W pixels. Row i of an episode is what is seen and felt before action i.

Each demonstration is kept as soon as it is made, so a run that was ended goes on where it stopped. Beginnings are drawn
by the tasks' own rules; the benchmark's initial states are left to evaluation.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from simforcing.data.episode import ActionConvention, StateConvention
from simforcing.data.lerobot_writer import LeRobotWriter
from simforcing.errors import SimForcingError
from simforcing.files import partial_path, write_text
from simforcing.policy.demos_expert import METRES, RADIANS, Expert
from simforcing.policy.libero_env import AGENT, CAMERAS, HZ, Libero, Seen, Stand, Task
from simforcing.policy.libero_numbers import FINGERS_APART, STAY_OPEN, to_recording
from simforcing.train.directory import claim_run
from simforcing.twin.parallel import Workers

Array = np.ndarray[Any, np.dtype[Any]]
STATE_NAMES = ("x", "y", "z", "rx", "ry", "rz", "finger_1", "finger_2")
ACTION_NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")
WAIT = 15
"""Steps in which things come to rest before a demonstration begins."""
LONGEST = 300
"""Steps after which the expert has failed."""
ATTEMPTS = 5
"""How often a demonstration is tried, each time from another beginning."""
CONVENTION = ActionConvention(
    kind="delta",
    relative_to="state",
    frame="base",
    rotation="rotvec",
    gripper="open_positive",
    gripper_range=(0.0, 1.0),
    hz=float(HZ),
    position_scale=METRES,
    angle_scale=RADIANS,
)


@dataclass(frozen=True)
class Making:
    """What demonstrations are made by: pictures' size, seed, and how much the expert's motion is disturbed."""

    parts: Path
    size: int = 256
    seed: int = 0
    noise: float = 1.0

    def plan(self) -> dict[str, Any]:
        """What must be the same for parts of one dataset."""
        return {"kind": "demonstrations", "format": 1, **{k: v for k, v in asdict(self).items() if k != "parts"}}


@dataclass(frozen=True)
class Demonstration:
    """One solved episode; actions and states as they are recorded."""

    images: Mapping[str, UInt8[Array, "N H W 3"]]
    state: Float32[Array, "N 8"]
    action: Float32[Array, "N 7"]


_worlds: dict[Task, Libero] = {}  # of this process: the world of the task that it works on


def make_demos(
    making: Making,
    tasks: Sequence[Task],
    episodes: int,
    workers: int = 1,
    report: Callable[[int, int, str], None] = lambda done, of, words: None,
) -> dict[str, Any]:
    """Makes what is missing of `episodes` demonstrations of each task; the expert's successes of each.

    Several tasks grow together: what there is at any time is balanced.

    Raises:
        SimForcingError: the expert cannot do a task, or the parts belong to other settings.
    """
    _check(making, episodes)
    claim_run(making.parts, making.plan())
    wanted = [(task, episode) for episode in range(episodes) for task in tasks]
    missing = [(t, e) for t, e in wanted if not part_file(making.parts, t, e).with_suffix(".json").exists()]
    missing.sort(key=lambda pair: (pair[1] // 10, pair[0].index, pair[1]))  # few changes of the world
    with Workers(workers) as pool:
        for done, ((task, episode), words) in enumerate(pool.each(partial(_make_in_worker, making), missing), 1):
            report(len(wanted) - len(missing) + done, len(wanted), f"{task.name} {episode}: {words}")
    return {task.name: success(making.parts, task, episodes) for task in tasks}


def measure_expert(
    making: Making,
    tasks: Sequence[Task],
    episodes: int,
    workers: int = 1,
    report: Callable[[int, int, str], None] = lambda done, of, words: None,
) -> dict[str, list[str]]:
    """Of every attempt at a task, the reason why it is no demonstration, or "": without pictures, nothing is kept.

    Raises:
        SimForcingError: a task asks for what the expert does not do, or a number makes no sense.
    """
    _check(making, episodes)
    wanted = [(task, episode) for task in tasks for episode in range(episodes)]
    found: dict[str, list[str]] = {task.name: [] for task in tasks}
    with Workers(workers) as pool:
        for done, ((task, episode), reason) in enumerate(pool.each(partial(_try_in_worker, making), wanted), 1):
            found[task.name].append(reason)
            report(done, len(wanted), f"{task.name} {episode}: {reason or 'solved'}")
    return found


def _try_in_worker(making: Making, what: tuple[Task, int]) -> str:
    task, episode = what
    made = perform(_world(making, task), _seed(making, task, episode, 0), making.noise, look=False)
    return made if isinstance(made, str) else ""


def _check(making: Making, episodes: int) -> None:
    if episodes < 1 or making.size < 2 or making.size % 2 or not 0 <= making.noise <= 5:
        raise SimForcingError(
            f"{episodes} episodes of {making.size} pixels with noise {making.noise:g}: give at least 1, an even size, "
            "and noise from 0 to 5"
        )


def _world(making: Making, task: Task) -> Libero:
    """The world of a task, which this process keeps."""
    if task not in _worlds:
        while _worlds:
            _worlds.popitem()[1].close()
        _worlds[task] = Libero(task, making.size)
    return _worlds[task]


def _seed(making: Making, task: Task, episode: int, attempt: int) -> int:
    suite = int.from_bytes(task.suite.encode()[-6:], "big")
    entropy = [making.seed, suite, task.index, episode, attempt]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _make_in_worker(making: Making, what: tuple[Task, int]) -> str:
    """One demonstration, with the world that this process keeps."""
    task, episode = what
    return make_one(making, _world(making, task), episode)


def make_one(making: Making, world: Libero, episode: int) -> str:
    """Makes and keeps one demonstration; says how it went.

    Raises:
        SimForcingError: the expert fails again and again.
    """
    task, reasons = world.task, list[str]()
    for attempt in range(ATTEMPTS):
        seed = _seed(making, task, episode, attempt)
        found = perform(world, seed, making.noise)
        if isinstance(found, Demonstration):
            about = {"attempts": attempt + 1, "steps": len(found.action), "seed": seed, "failed": reasons}
            _save(part_file(making.parts, task, episode), found, about)
            return f"{len(found.action)} steps" + (f", attempt {attempt + 1}" if attempt else "")
        reasons.append(found)
    raise SimForcingError(
        f"{task.name} ({task.instruction}): the expert failed {ATTEMPTS} times ({reasons[-1]}); choose other --tasks, "
        "or less --noise"
    )


def perform(world: Libero, seed: int, noise: float = 1.0, look: bool = True) -> Demonstration | str:
    """One attempt from a random beginning; or why it is no demonstration. look: with pictures, which cost most."""
    world.start_anywhere(seed)
    for _ in range(WAIT):
        world.step(STAY_OPEN)
    if world.solved():
        return "solved before it began"
    seen, actions = [], list[Array]()
    try:
        expert = Expert(world, seed, noise)
        while expert.phase != "done":
            if len(actions) == LONGEST:
                return f"not done after {LONGEST} steps"
            seen.append(world.look() if look else Seen({}, world.state()))
            actions.append(expert.action().astype(np.float32))
            world.step(actions[-1])
    except SimForcingError as error:
        if not actions:
            raise  # nothing that another beginning would change
        return str(error)
    if not world.solved():
        return "not solved at the end"
    images = {key: np.stack([one.images[key] for one in seen]) for key in seen[0].images}
    return Demonstration(images, np.stack([one.state for one in seen]), to_recording(np.stack(actions)))


# -- parts -------------------------------------------------------------------------------------------------------------


def part_file(parts: Path, task: Task, episode: int) -> Path:
    """Where a demonstration is kept; the `.json` beside it, written last, says how it was made."""
    return parts / f"{task.name}-{episode:04d}.npz"


def _save(file: Path, made: Demonstration, about: Mapping[str, Any]) -> None:
    """Pictures as differences to the one before, which are mostly zero."""
    arrays = {f"images/{key}": np.diff(video, axis=0, prepend=np.uint8(0)) for key, video in made.images.items()}
    partial_file = partial_path(file)
    with partial_file.open("wb") as out:
        np.savez_compressed(out, state=made.state, action=made.action, **arrays)  # type: ignore[arg-type]
    os.replace(partial_file, file)
    write_text(file.with_suffix(".json"), json.dumps(about) + "\n")


def load_part(file: Path) -> Demonstration:
    """Inverse of what a run keeps. Raises SimForcingError for a damaged file."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            images = {key: np.cumsum(stored[f"images/{key}"], axis=0, dtype=np.uint8) for key in CAMERAS}
            return Demonstration(images, stored["state"], stored["action"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise SimForcingError(
            f"{file}: damaged ({error}); delete it and the .json beside it, and run the same command again"
        ) from error


def success(parts: Path, task: Task, episodes: int) -> dict[str, int]:
    """How many demonstrations there are, and how many attempts they took."""
    attempts = [
        int(json.loads(part_file(parts, task, i).with_suffix(".json").read_text())["attempts"]) for i in range(episodes)
    ]
    return {"episodes": episodes, "attempts": sum(attempts)}


def assemble_demos(
    making: Making,
    tasks: Sequence[Task],
    episodes: int,
    out: Path,
    summary: Mapping[str, Any],
    stand: Stand | None = None,
) -> Path:
    """Puts the parts together: `episodes` of each task, task by task within a round.

    stand: where robot and camera stand in all of them, which is what `twin pair` draws the arm by.
    """
    writer = LeRobotWriter(
        out,
        fps=HZ,
        robot="panda",
        cameras=dict.fromkeys(CAMERAS, (making.size, making.size)),
        state_names=STATE_NAMES,
        action_names=ACTION_NAMES,
        meta=meta_of(making, summary, stand),
    )
    with writer:
        for task, made in _parts(making.parts, tasks, episodes):
            writer.add_episode(made.images, made.state, made.action, task.instruction)
    return out


def _parts(parts: Path, tasks: Sequence[Task], episodes: int) -> Iterator[tuple[Task, Demonstration]]:
    for episode in range(episodes):
        for task in tasks:
            yield task, load_part(part_file(parts, task, episode))


def where_all_stand(tasks: Sequence[Task], size: int) -> Stand | None:
    """Where robot and camera stand in all of the tasks; None where they differ."""
    found: list[Stand] = []
    for task in tasks:
        with Libero(task, size) as world:
            found.append(world.stand())
    return found[0] if all(stand == found[0] for stand in found) else None


def meta_of(making: Making, summary: Mapping[str, Any], stand: Stand | None) -> dict[str, Any]:
    """Content of `meta/simforcing.json`."""
    told = {} if stand is None else {"state": state_of(stand).to_dict(), "cameras": {AGENT: stand.camera}}
    return {
        "action": CONVENTION.to_dict(),
        **told,
        "libero": {
            "expert": {"seed": making.seed, "noise": making.noise, "tasks": dict(summary)},
            "orientation": "turned by 180 degrees: upright and mirrored, as public recordings of LIBERO",
            "cameras": CAMERAS,
            "state": "end-effector position (m), axis times angle (rad), both fingers (m)",
        },
    }


def state_of(stand: Stand) -> StateConvention:
    """What LIBERO's states mean where the robot stands like this."""
    return StateConvention(gripper_range=(0.0, FINGERS_APART), fingers=True, base=stand.base)
