"""`simforcing twin ...`: the simulated twin of real episodes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from simforcing.errors import SimForcingError


@dataclass(frozen=True)
class Pair:
    """Add the arm-only simulated view to real episodes: a paired LeRobot v3.0 dataset and QA pictures.

    Example:
      simforcing twin pair data/droid_lerobot data/pairs --robot panda.urdf --camera exterior_1
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Dataset of real episodes; state and action are xyz, rotation, gripper."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory to make; must not exist."""
    robot: str
    """Path of an MJCF (.xml) or URDF, or a bundled arm: widowx250s, panda."""
    camera_file: Path | None = None
    """Where the camera stands (camera.json); without it a guess: real and sim move alike, not overlaid."""
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
    rotation: Literal["auto", "rotvec", "euler_xyz"] = "auto"
    """How rotations are stored; auto: as stored or named in the dataset."""
    max_error_cm: float = 1.0
    """Poses missed by more than this are out of reach."""
    max_error_degrees: float = 5.0
    """The same for rotation."""
    skip_bad: bool = False
    """Leave out episodes with poses out of reach, count and list them; without it they are an error."""
    qa_episodes: int = 3
    """Number of episodes that get a contact sheet in OUT/qa."""

    def run(self) -> int:
        """Make the dataset, print what was made; 0 on success."""
        import numpy as np

        from simforcing.cli.show import progress
        from simforcing.twin.camera import Camera
        from simforcing.twin.pairs import Conventions, pair
        from simforcing.twin.replay import Tolerance, poses
        from simforcing.twin.robot import Robot

        if self.out.exists():
            raise SimForcingError(f"{self.out}: exists already; choose another output, or delete it first")
        robot = Robot.load(self.robot, ee=self.ee)
        camera = Camera.load(self.camera_file) if self.camera_file else None
        offset = None if self.tool_offset is None else poses(np.array([[*self.tool_offset, 0.0]]), "rotvec")[0]
        with progress() as show:
            made = pair(
                self.data,
                self.out,
                robot,
                camera=camera,
                camera_key=self.camera,
                follow=self.follow,
                conventions=Conventions(self.gripper, self.rotation),
                offset=offset,
                tolerance=Tolerance(self.max_error_cm / 100, float(np.radians(self.max_error_degrees))),
                skip_bad=self.skip_bad,
                qa_episodes=self.qa_episodes,
                report=lambda stage, done, total: show(stage, done / total, f"{done} of {total} episodes"),
            )
        for note in made.notes:
            print(note)
        for _, reason in made.skipped:
            print(f"skipped {reason}")
        left_out = f", {len(made.skipped)} skipped" if made.skipped else ""
        miss = f"'{robot.ee_name}' follows the {self.follow} within {1000 * made.worst_position:.2f} mm"
        print(f"{made.out}: {made.episodes} episodes, {made.frames} frames{left_out}; {miss}; see its qa/")
        return 0
