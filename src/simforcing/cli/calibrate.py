"""`simforcing twin calibrate`: where the camera of a dataset stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from simforcing.errors import check_seed

if TYPE_CHECKING:
    from simforcing.twin.calibrate import Result


@dataclass(frozen=True)
class Calibrate:
    """Find where a camera stands and how wide it sees, from real episodes alone: camera.json for `twin pair`.

    The robot's recorded states say where its links were, the video shows what moved; the camera is the one from which
    both agree. Beside camera.json it writes camera.report.json, with the error in frames that were held out, and
    camera.overlays/ with one picture an episode: look at these before you use the camera.

    Example:
      simforcing twin calibrate data/droid --robot panda.urdf --camera camera_0 --per-episode -o cameras/left.json
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Dataset of real episodes; states are xyz, rotation, gripper, or named joints."""
    robot: str
    """Path of an MJCF (.xml) or URDF, a bundled arm (widowx250s, panda), or a name of MuJoCo Menagerie."""
    camera: str | None = None
    """Camera of the dataset, such as exterior_1; default the first that is no wrist camera."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("camera.json")
    """Camera file to write; nothing that is there is replaced."""
    per_episode: bool = False
    """One camera for each episode (camera_000003.json, ...), for data from several places; else one for all."""
    episodes: tuple[int, ...] = ()
    """Episodes to use; default all, but at most twelve, spread evenly, where they share a camera."""
    fovy: float | None = None
    """Vertical field of view in degrees, where it is known; else it is found too."""
    ee: str | None = None
    """Robot frame whose pose the states give; default panda_link8, ee_gripper_link, ... or the last link."""
    tool_offset: tuple[float, float, float, float, float, float] | None = None
    """Reported frame seen from --ee, where they differ: x y z (metres), rotation vector (radians)."""
    gripper: Literal["auto", "open_positive", "closed_positive"] = "auto"
    """Which end of the gripper's range is open; auto: as stored, else by how episodes start."""
    rotation: Literal["auto", "rotvec", "euler_xyz", "quaternion"] = "auto"
    """How rotations are stored; auto: as stored or named in the dataset."""
    max_error_cm: float = 1.0
    """Poses missed by more than this are out of reach."""
    max_error_degrees: float = 5.0
    """The same for rotation."""
    quick: bool = False
    """A first look: a fraction of the search, which may miss the camera."""
    seed: int = 0
    """Of the search; the same seed finds the same camera."""
    restarts: int | None = None
    """How often the whole search runs, each time from the next seed; the best is kept. Default 2; 1 with --quick."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "--seed")

    def run(self) -> int:
        """Fit, write, print one line a camera; 0 on success."""
        import numpy as np

        from simforcing.cli.show import progress
        from simforcing.twin.calibrate import Source, calibrate
        from simforcing.twin.camera_fit import QUICK
        from simforcing.twin.pairs import Conventions
        from simforcing.twin.replay import Tolerance, poses
        from simforcing.twin.robot import Robot

        offset = None if self.tool_offset is None else poses(np.array([[*self.tool_offset, 0.0]]), "rotvec")[0]
        source = Source(
            self.camera,
            self.episodes or None,
            Conventions(self.gripper, self.rotation),
            offset,
            Tolerance(self.max_error_cm / 100, float(np.radians(self.max_error_degrees))),
        )
        with progress() as show:
            results = calibrate(
                self.data,
                self.out,
                Robot.load(self.robot, ee=self.ee),
                source,
                per_episode=self.per_episode,
                fovy=self.fovy,
                effort=QUICK if self.quick else None,
                seed=self.seed,
                restarts=self.restarts,
                report=show,
            )
        for note in results.notes:
            print(note)
        for _, reason in results.skipped:
            print(f"skipped {reason}")
        for result in results.cameras:
            print(_line(result))
        print(f"overlays: {self.out.with_suffix('.overlays')}, figures: {self.out.with_suffix('.report.json')}")
        return 0


def _line(result: Result) -> str:
    """The camera file, its errors in held-out frames against the default guess, and doubts."""
    found = result.found
    now, guess = found.held_out, found.guess_held_out
    doubts = f"; doubtful: {', '.join(result.doubts)}" if result.doubts else ""
    return (
        f"{result.path}: field of view {found.camera.fovy:.1f} degrees; held-out motion: overlap {now.overlap:.2f} "
        f"(default guess {guess.overlap:.2f}), {now.distance:.1f} pixels off ({guess.distance:.1f}){doubts}"
    )
