"""`simforcing twin ...`: the simulated twin of real episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from simforcing.cli.shards import parse_shard
from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64


@dataclass(frozen=True)
class Pair:
    """Add the arm-only simulated view to real episodes: a paired LeRobot v3.0 dataset and QA pictures.

    Example:
      simforcing twin pair data/droid_lerobot data/pairs --robot panda.urdf --camera exterior_1 --workers 2

    A run that ends early goes on where it stopped when it is started again. Several machines share the work by
    --shard 1/4, 2/4, ... on a common disk; the same command without --shard puts everything together.
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Dataset of real episodes; state and action are xyz, rotation, gripper."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory to make; must not exist."""
    robot: str
    """Path of an MJCF (.xml) or URDF, a bundled arm (widowx250s, panda), or a name of MuJoCo Menagerie."""
    camera_file: Path | None = None
    """What calibrate wrote to -o, one camera or one an episode; without it a guess: real and sim move alike, not
    overlaid."""
    camera: str | None = None
    """Camera of the dataset, such as exterior_1; default the first that is no wrist camera."""
    ee: str | None = None
    """Robot frame whose pose the states give; default panda_link8, ee_gripper_link, ... or the last link."""
    tool_offset: tuple[float, float, float, float, float, float] | None = None
    """Reported frame seen from --ee, where they differ: x y z (metres), rotation vector (radians)."""
    follow: Literal["state", "action"] = "state"
    """Show the measured poses, or those that the actions command."""
    gripper: Literal["auto", "open_positive", "closed_positive"] = "auto"
    """Which end of the gripper's range is open; auto: as stored, else by how episodes start."""
    rotation: Literal["auto", "rotvec", "euler_xyz", "quaternion"] = "auto"
    """How rotations are stored; auto: as stored or named in the dataset."""
    max_error_cm: float = 1.0
    """Poses missed by more than this are out of reach."""
    max_error_degrees: float = 5.0
    """The same for rotation."""
    start_pose: tuple[float, float, float, float, float, float] | None = None
    """Where the arm starts, for data without states: x y z (metres), rotation vector (radians)."""
    first_frame: Literal["rendered", "masked"] = "rendered"
    """First simulated frame: rendered, or the arm cut out of the real frame by a mask (see --arm-masks)."""
    arm_masks: Path | None = None
    """Folder of masks of first frames, episode_000000.png, ..., white where the arm is; default the rendered arm."""
    skip_bad: bool = False
    """Leave out damaged episodes and poses out of reach, count and list them; without it they are an error."""
    qa_episodes: int = 3
    """Number of episodes that get a contact sheet in OUT/qa; doubtful ones get one anyway."""
    workers: int = 1
    """Processes that draw at once."""
    engine: Literal["processes", "ray"] = "processes"
    """Where they run: on this machine, or on the Ray cluster that there is (else a local one)."""
    shard: str | None = None
    """Draw only a part of the episodes, such as 1/4, the first of four."""

    def run(self) -> int:
        """Make the dataset, print what was made; 0 on success."""
        import numpy as np

        from simforcing.cli.show import progress
        from simforcing.twin.camera import load_cameras
        from simforcing.twin.pairs import Conventions, pair
        from simforcing.twin.replay import Tolerance
        from simforcing.twin.robot import Robot

        if self.out.exists():
            raise SimForcingError(f"{self.out}: exists already; choose another output, or delete it first")
        shard = None if self.shard is None else parse_shard(self.shard)
        robot = Robot.load(self.robot, ee=self.ee)
        with progress() as show:
            made = pair(
                self.data,
                self.out,
                robot,
                camera=load_cameras(self.camera_file) if self.camera_file else None,
                camera_key=self.camera,
                follow=self.follow,
                conventions=Conventions(self.gripper, self.rotation),
                start=_pose(self.start_pose),
                offset=_pose(self.tool_offset),
                tolerance=Tolerance(self.max_error_cm / 100, float(np.radians(self.max_error_degrees))),
                first_frame=self.first_frame,
                arm_masks=self.arm_masks,
                skip_bad=self.skip_bad,
                qa_episodes=self.qa_episodes,
                workers=self.workers,
                engine=self.engine,
                shard=shard,
                report=lambda stage, done, total: show(stage, done / total, f"{done} of {total} episodes"),
            )
        for note in made.notes:
            print(note)
        for _, reason in made.skipped:
            print(f"skipped {reason}")
        for number, reason in made.flagged:
            print(f"doubtful: episode {number} {reason}")
        left_out = f", {len(made.skipped)} skipped" if made.skipped else ""
        doubtful = f", {len(made.flagged)} doubtful" if made.flagged else ""
        counts = f"{made.episodes} episodes, {made.frames} frames{left_out}{doubtful}"
        if shard is not None:
            then = "put them together" if not made.left else f"draw the {made.left} that are left and put all together"
            print(f"{made.parts}: {counts}; the same command without --shard will {then}")
            return 0
        miss = f"'{robot.ee_name}' follows the {self.follow} within {1000 * made.worst_position:.2f} mm"
        print(f"{made.out}: {counts}; {miss}; see {made.out / 'qa' / 'index.html'}")
        return 0


@dataclass(frozen=True)
class Augment:
    """Simulated rollouts on augmented trajectories of a paired dataset, for the teacher, and the coverage gained.

    Example:
      simforcing twin augment data/pairs data/rollouts --per-episode 8 --robot panda.urdf --workers 2

    Recorded motions are changed (way points, speed, start), spliced, or replaced by reaching for random places; within
    the limits of joints and workspace, and above the table. The same seed gives the same set.
    """

    pairs: Annotated[Path, tyro.conf.Positional]
    """Paired dataset, from 'simforcing twin pair' or of the bundled world."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory to make; must not exist."""
    per_episode: int
    """Rollouts of each episode, each as long as it."""
    seed: int = 0
    """Same seed, same rollouts."""
    robot: str | None = None
    """The model that the pairs were made with; not needed for bundled arms and MuJoCo Menagerie."""
    spliced: float = 0.25
    """Share of rollouts that join segments of different episodes."""
    reaching: float = 0.25
    """Share of rollouts that reach for random places; the rest are changed recorded motions."""
    split: Path | None = None
    """Split file (of 'encode'): only its episodes 'train' are augmented, so that the others stay unseen."""
    workers: int = 1
    """Processes that draw at once."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "--seed")

    def run(self) -> int:
        """Make the dataset, print what was made and gained; 0 on success."""
        from simforcing.cli.show import progress
        from simforcing.data.windows import load_split
        from simforcing.twin.augmented import augment
        from simforcing.twin.robot import Robot
        from simforcing.twin.rollouts import RolloutConfig

        episodes = None
        if self.split is not None:
            parts = load_split(self.split)
            if "train" not in parts:
                raise SimForcingError(f"{self.split}: has no part 'train', only {', '.join(parts)}")
            episodes = parts["train"]
        robot = None if self.robot is None else Robot.load(self.robot, ee=_frame_of(self.pairs))
        with progress() as show:
            made = augment(
                self.pairs,
                self.out,
                per_episode=self.per_episode,
                seed=self.seed,
                robot=robot,
                config=RolloutConfig(self.spliced, self.reaching),
                episodes=episodes,
                workers=self.workers,
                report=lambda done, total: show("rollouts", done / total, f"of {done} of {total} episodes"),
            )
        for note in made.notes:
            print(note)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(made.kinds.items()))
        given_up = f", {made.given_up} given up" if made.given_up else ""
        places = made.coverage["places"]
        print(
            f"{made.out}: {made.episodes} rollouts ({kinds}{given_up}), {made.frames} frames; the arm visits "
            f"{places['after']} places instead of {places['before']}; see {made.out / 'qa' / 'index.html'}"
        )
        return 0


def _frame_of(pairs: Path) -> str | None:
    """The end-effector frame that pairs were made with; None where they do not say."""
    from simforcing.data import open_dataset

    stored = open_dataset(pairs).meta.get("robot")
    return str(stored["end_effector"]) if isinstance(stored, dict) and "end_effector" in stored else None


def _pose(numbers: tuple[float, float, float, float, float, float] | None) -> Float64[np.ndarray, "4 4"] | None:
    """The matrix of x y z (metres) and a rotation vector (radians)."""
    if numbers is None:
        return None
    import numpy as np

    from simforcing.twin.replay import poses

    return np.asarray(poses(np.array([[*numbers, 0.0]]), "rotvec")[0])
