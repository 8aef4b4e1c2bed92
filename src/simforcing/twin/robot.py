"""A robot arm from any MJCF or URDF: joints, end-effector frame, gripper, forward and inverse kinematics.

Shapes: N frames, n arm joints. Poses are 4x4 float64 homogeneous matrices in the robot's base frame (the body
that carries the first arm joint). Metres, radians, quaternions wxyz.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mink
import mujoco
import numpy as np
from jaxtyping import Bool, Float64

from simforcing.errors import SimForcingError
from simforcing.twin import menagerie
from simforcing.twin.urdf import read_urdf

BUNDLED = ("widowx250s", "panda")
# Frames whose pose a controller reports, in order of preference. `panda_link8` comes before the hand: it is
# the frame of DROID's cartesian states (forward kinematics of its joints meets them to 0.001 mm, no offset).
EE_NAMES = (
    "panda_link8",
    "fr3_link8",
    "ee_gripper_link",
    "ee",
    "panda_hand_tcp",
    "panda_hand",
    "fr3_hand_tcp",
    "fr3_hand",
    "tool0",
    "tcp",
    "grasp_site",
    "pinch",
    "attachment_site",
    "gripper_site",
    "gripperframe",
    "gripper_link",
    "ee_link",
    "end_effector",
    "hand",
)
_GRIPPER = re.compile(r"finger|gripper|jaw|knuckle|claw", re.IGNORECASE)
_HINGE_SLIDE = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
_UNLIMITED = 2 * np.pi  # range given to a joint without limits
_TURN_COST = 0.3  # metres that a radian of rotation error weighs in the IK
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=np.float64)
LIMIT_MARGIN = 1e-3  # a joint this close to its limit counts as at it (rad or m)


@dataclass(frozen=True)
class IKResult:
    """A joint path: `q` and, per frame, what it misses the pose by, and whether a joint sits at its limit.

    `converged`: within the tolerances of the solver. A frame that is at a limit and did not converge asks for
    more than the joint limits give.
    """

    q: Float64[np.ndarray, "N n"]
    position_error: Float64[np.ndarray, " N"]  # metres
    rotation_error: Float64[np.ndarray, " N"]  # radians
    at_limit: Bool[np.ndarray, " N"]
    converged: Bool[np.ndarray, " N"]


@dataclass(frozen=True)
class Finger:
    """A gripper joint and its positions when the gripper is closed and open."""

    joint: str
    closed: float
    open: float


def pose_matrix(
    position: Float64[np.ndarray, " 3"], rotation: Float64[np.ndarray, "3 3"]
) -> Float64[np.ndarray, "4 4"]:
    """The 4x4 matrix of a position (metres) and a rotation matrix."""
    out = np.eye(4)
    out[:3, :3], out[:3, 3] = rotation, position
    return out


class Robot:
    """A kinematic robot arm; `Robot.load` makes one.

    Attributes: `name`, `source` (path or bundled name), `origin` (what `load` makes it from again, in another process;
    None for one made from a specification), `sha256` of the model file, `mjspec` (copy it before
    attaching it to a scene), `model`, `data`, `base_name`, `ee_name`, `joint_names` (base to tip), `limits`
    [n, 2], `home` [n], `fingers`.
    """

    def __init__(
        self, spec: mujoco.MjSpec, *, name: str, ee: str | None = None, source: str = "", sha256: str = ""
    ) -> None:
        """Take a robot from a MuJoCo specification; see `load` for the errors."""
        self.name, self.source, self.sha256, self.mjspec = name, source or name, sha256, spec
        for kind, things in (("body", spec.bodies), ("joint", spec.joints)):  # we refer to them by name
            for i, thing in enumerate(things):
                thing.name = thing.name or f"{kind}{i}"
        try:
            self.model = spec.compile()
        except ValueError as error:
            raise SimForcingError(f"robot {self.source}: {_reason(error)}") from error
        self.data = mujoco.MjData(self.model)
        self.ee_name, self._ee_type, self._ee_id = _find_ee(self.model, ee, self.source)
        body = self._ee_id if self._ee_type == "body" else int(self.model.site_bodyid[self._ee_id])
        joints = _chain(self.model, body, self.source)
        self.joint_names = tuple(self.model.joint(j).name for j in joints)
        self._qpos = self.model.jnt_qposadr[joints]
        limited = self.model.jnt_limited[joints].astype(bool)[:, None]
        self.limits: Float64[np.ndarray, "n 2"] = np.where(
            limited, self.model.jnt_range[joints], [-_UNLIMITED, _UNLIMITED]
        )
        self._moving = _shapes_below(self.model, joints[0])
        self._wrist = _shapes_below(self.model, joints[-min(3, len(joints))])
        self._base = int(self.model.body_parentid[self.model.jnt_bodyid[joints[0]]])
        self.base_name = str(self.model.body(self._base).name)
        self._rest = _rest(self.model)
        self.home = _home(self.model, self._rest[self._qpos], self.limits)
        self._rest[self._qpos] = self.home
        self.data.qpos[:] = self._rest
        mujoco.mj_kinematics(self.model, self.data)
        self._base_pose = pose_matrix(self.data.xpos[self._base], self.data.xmat[self._base].reshape(3, 3))
        self.fingers = _fingers(self.model, self._rest, joints)
        self._solver: tuple[mink.Configuration, mink.FrameTask, list[mink.Limit]] | None = None
        self.origin: str | None = None

    @classmethod
    def load(cls, spec: str | Path, *, ee: str | None = None) -> "Robot":
        """A bundled arm (`widowx250s`, `panda`), the model at a path (`.xml` MJCF, `.urdf`), or a name of MuJoCo
        Menagerie such as `franka_emika_panda` (see `menagerie.model_file`).

        `ee` names the body or site whose pose states and targets give; without it the first of `EE_NAMES`
        that the model has, else the link that carries the fingers. Raises SimForcingError for an unknown
        name, a file that is no robot model, missing meshes, a model without movable joints, and an unknown
        `ee`.
        """
        if str(spec) in BUNDLED:
            from simforcing.twin import arms

            bundled = arms.widowx250s() if str(spec) == "widowx250s" else arms.panda()
            digest = hashlib.sha256(bundled.to_xml().encode()).hexdigest()
            robot = cls(bundled, name=str(spec), ee=ee, source=f"bundled {spec}", sha256=digest)
            robot.origin = str(spec)
            return robot
        path = Path(spec)
        if not path.exists() and menagerie.looks_like_a_name(str(spec)):
            path = menagerie.model_file(str(spec), BUNDLED)
        if not path.is_file():
            raise SimForcingError(
                f"robot '{spec}': no such file; give an .xml (MJCF) or .urdf, or one of {', '.join(BUNDLED)}"
            )
        if path.suffix.lower() not in (".xml", ".urdf"):
            raise SimForcingError(f"robot {path}: not a robot model; expected .xml (MJCF) or .urdf")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        robot = cls(_read(path), name=path.stem, ee=ee, source=str(path), sha256=digest)
        robot.origin = str(path.resolve())
        return robot

    def set_joints(self, data: mujoco.MjData, q: Float64[np.ndarray, " n"], opening: float | None = None) -> None:
        """Write arm joints `q`, gripper `opening` (0 closed, 1 open) and body poses into `data`."""
        data.qpos[:] = self._rest
        data.qpos[self._qpos] = q
        if opening is not None:
            for joint, value in self.finger_positions(opening).items():
                data.qpos[self.model.joint(joint).qposadr[0]] = value
        mujoco.mj_kinematics(self.model, data)

    def fk(self, q: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, "4 4"]:
        """Pose of the end-effector in the base frame for arm joints `q` (radians; metres where prismatic)."""
        self.set_joints(self.data, q)
        where = self.data.body(self._ee_id) if self._ee_type == "body" else self.data.site(self._ee_id)
        return np.linalg.solve(self._base_pose, pose_matrix(where.xpos, where.xmat.reshape(3, 3)))

    def fk_path(self, q: Float64[np.ndarray, "N n"]) -> Float64[np.ndarray, "N 4 4"]:
        """`fk` of every row."""
        return np.stack([self.fk(row) for row in q])

    @property
    def length(self) -> float:
        """Length of the arm in metres: from the base from joint to joint to the end-effector."""
        tip = self._base_pose @ self.fk(self.home)
        links = [self._base, *(int(self.model.joint(name).bodyid[0]) for name in self.joint_names)]
        points = [*self.data.xpos[links], tip[:3, 3]]
        return float(np.linalg.norm(np.diff(points, axis=0), axis=1).sum())

    def frame_poses(self, q: Float64[np.ndarray, " n"]) -> dict[str, Float64[np.ndarray, "4 4"]]:
        """Pose of every named body and site in the base frame for arm joints `q`."""
        self.set_joints(self.data, q)
        model, data = self.model, self.data
        named = [(model.body(i).name, data.body(i)) for i in range(1, model.nbody)]
        named += [(model.site(i).name, data.site(i)) for i in range(model.nsite)]
        return {
            name: np.linalg.solve(self._base_pose, pose_matrix(frame.xpos, frame.xmat.reshape(3, 3)))
            for name, frame in named
            if name
        }

    def surface_points(
        self, q: Float64[np.ndarray, " n"], opening: float | None = None, *, size: float = 0.6, wrist: bool = False
    ) -> Float64[np.ndarray, "K 3"]:
        """Points on everything that moves, in the base frame: corners of the bounding box of each shape.

        `size` scales the boxes about their middles; 1 encloses the arm. wrist: only what the last three joints move.
        """
        self.set_joints(self.data, q, opening)
        moving = self._wrist if wrist else self._moving
        boxes = self.model.geom_aabb[moving]
        corners = boxes[:, None, :3] + size * boxes[:, None, 3:] * _CORNERS
        turns = self.data.geom_xmat[moving].reshape(-1, 3, 3)
        world = np.einsum("gij,gkj->gki", turns, corners) + self.data.geom_xpos[moving][:, None]
        base = self._base_pose
        return np.asarray((world.reshape(-1, 3) - base[:3, 3]) @ base[:3, :3])

    def finger_positions(self, opening: float) -> dict[str, float]:
        """Position of every gripper joint for `opening` in [0, 1], 1 = open (clipped); {} without one."""
        part = min(max(float(opening), 0.0), 1.0)
        return {f.joint: f.closed + part * (f.open - f.closed) for f in self.fingers}

    def ik(
        self,
        targets: Float64[np.ndarray, "N 4 4"],
        q0: Float64[np.ndarray, " n"] | None = None,
        *,
        position_tolerance: float = 1e-4,
        rotation_tolerance: float = 1e-3,
        iterations: int = 30,
        restarts: int = 24,
    ) -> IKResult:
        """The joint path that follows `targets` (base frame), each frame warm-started from the one before.

        Starts from `q0`, else `home`. A frame that misses a tolerance (metres, radians) after `iterations` is
        tried again from `home` and from `restarts` seeded joint vectors (fewer while frame after frame is
        missed), and the best answer is kept: nothing is raised for an unreachable pose, its errors say so.
        Joint limits always hold. Raises SimForcingError for targets that are not finite [N, 4, 4].
        """
        poses = np.asarray(targets, dtype=np.float64)
        if poses.ndim != 3 or poses.shape[1:] != (4, 4) or not np.isfinite(poses).all():
            raise SimForcingError(f"robot {self.name}: ik needs finite targets [N, 4, 4], not {list(poses.shape)}")
        tolerance = (position_tolerance, rotation_tolerance)
        q = np.clip(self.home if q0 is None else np.asarray(q0, dtype=np.float64), *self.limits.T)
        rows: list[Float64[np.ndarray, " n"]] = []
        errors: list[tuple[float, float]] = []
        for pose in poses:
            best = self._solve(pose, q, tolerance, iterations)
            if not _within(best[1], tolerance):
                lost = bool(errors) and not _within(errors[-1], tolerance)
                best = self._retry(pose, best, tolerance, iterations, restarts // 6 if lost else restarts)
            q = best[0]
            rows.append(q)
            errors.append(best[1])
        path = np.array(rows).reshape(len(poses), len(self.joint_names))
        missed = np.array(errors).reshape(len(poses), 2)
        near = (path <= self.limits[:, 0] + LIMIT_MARGIN) | (path >= self.limits[:, 1] - LIMIT_MARGIN)
        there = np.asarray((missed <= tolerance).all(axis=1))
        return IKResult(path, missed[:, 0], missed[:, 1], np.asarray(near.any(axis=1)), there)

    def _solve(
        self,
        pose: Float64[np.ndarray, "4 4"],
        q: Float64[np.ndarray, " n"],
        tolerance: tuple[float, float],
        most: int,
    ) -> tuple[Float64[np.ndarray, " n"], tuple[float, float]]:
        """Differential IK from `q` to one pose: joints, (position, rotation) error."""
        if self._solver is None:
            task = mink.FrameTask(self.ee_name, self._ee_type, 1.0, _TURN_COST, lm_damping=0.01)
            self._solver = (mink.Configuration(self.model), task, [mink.ConfigurationLimit(self.model)])
        configuration, task, limits = self._solver
        task.set_target(mink.SE3.from_matrix(self._base_pose @ pose))
        full = self._rest.copy()
        full[self._qpos] = q
        configuration.update(full)
        before = np.inf
        for step in range(most + 1):
            error = task.compute_error(configuration)
            missed = (float(np.linalg.norm(error[:3])), float(np.linalg.norm(error[3:])))
            size = _cost(missed)
            if _within(missed, tolerance) or step == most or (step > 4 and size > 0.999 * before):
                break
            before = size
            velocity = mink.solve_ik(configuration, [task], 1.0, "daqp", damping=1e-6, limits=limits)
            configuration.integrate_inplace(velocity, 1.0)
        return np.clip(configuration.q[self._qpos], *self.limits.T), missed

    def _retry(
        self,
        pose: Float64[np.ndarray, "4 4"],
        best: tuple[Float64[np.ndarray, " n"], tuple[float, float]],
        tolerance: tuple[float, float],
        most: int,
        restarts: int,
    ) -> tuple[Float64[np.ndarray, " n"], tuple[float, float]]:
        """Other starts for a pose that was missed; the first answer within tolerance, else the one given."""
        random = np.random.default_rng(0)
        low, high = self.limits.T
        starts = [self.home, *(random.uniform(low, high) for _ in range(restarts))]
        for start in starts:
            answer = self._solve(pose, start, tolerance, most)
            if _within(answer[1], tolerance):
                return answer
            if _cost(answer[1]) < 0.9 * _cost(best[1]):
                best = answer
        return best


def _cost(missed: tuple[float, float]) -> float:
    return missed[0] + _TURN_COST * missed[1]


def _within(missed: tuple[float, float], tolerance: tuple[float, float]) -> bool:
    return missed[0] <= tolerance[0] and missed[1] <= tolerance[1]


def _read(path: Path) -> mujoco.MjSpec:
    """The specification in an .xml or .urdf file (an .xml that holds a URDF is read as one)."""
    if path.suffix.lower() == ".urdf" or b"<robot" in path.read_bytes()[:4096]:
        return read_urdf(path)
    try:
        return mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise SimForcingError(f"robot {path}: {_reason(error)}") from error


def _reason(error: ValueError) -> str:
    """MuJoCo's complaint in one line, with a remedy where a file is missing."""
    text = " ".join(str(error).split()).removeprefix("Error: ")
    return f"{text}; put the file where the model names it" if "opening file" in text else text


def _movable(model: mujoco.MjModel, body: int) -> list[int]:
    first = int(model.body_jntadr[body])
    return list(range(first, first + int(model.body_jntnum[body]))) if first >= 0 else []


def _ancestors(model: mujoco.MjModel, body: int) -> list[int]:
    """Bodies from the world's child down to `body`."""
    path = []
    while body != 0:
        path.append(body)
        body = int(model.body_parentid[body])
    return path[::-1]


def _shapes_below(model: mujoco.MjModel, joint: int) -> list[int]:
    """Geoms that a joint moves."""
    first = int(model.jnt_bodyid[joint])
    return [g for g in range(model.ngeom) if first in _ancestors(model, int(model.geom_bodyid[g]))]


def _chain(model: mujoco.MjModel, body: int, source: str) -> list[int]:
    """Joints between the world and `body`, base first; all hinge or slide."""
    joints = [joint for link in _ancestors(model, body) for joint in _movable(model, link)]
    if not joints:
        raise SimForcingError(
            f"robot {source}: no movable joints before '{model.body(body).name}'; name another frame with ee"
        )
    for joint in joints:
        if int(model.jnt_type[joint]) not in _HINGE_SLIDE:
            raise SimForcingError(
                f"robot {source}: joint '{model.joint(joint).name}' is no hinge or slide; give an arm"
            )
    return joints


def _find_ee(model: mujoco.MjModel, ee: str | None, source: str) -> tuple[str, str, int]:
    """Name, kind (`body` or `site`) and id of the end-effector frame."""
    if not any(int(kind) in _HINGE_SLIDE for kind in model.jnt_type):
        raise SimForcingError(f"robot {source}: no movable joints; give the model of an arm")
    sites = {model.site(i).name: i for i in range(model.nsite)}
    bodies = {model.body(i).name: i for i in range(1, model.nbody)}
    for name in [ee] if ee is not None else EE_NAMES:
        if name in sites:
            return name, "site", sites[name]
        if name in bodies:
            return name, "body", bodies[name]
    if ee is not None:
        known = ", ".join(sorted(name for name in {**bodies, **sites} if name))
        raise SimForcingError(f"robot {source}: no body or site '{ee}'; it has {known}")
    body = _last_before_fingers(model, source)
    return str(model.body(body).name), "body", body


def _last_before_fingers(model: mujoco.MjModel, source: str) -> int:
    """The body where the arm ends: where joints branch, before a joint named as a gripper, or at the tip."""
    moving = [b for b in range(1, model.nbody) if _movable(model, b)]
    link = 0
    while True:
        below = [b for b in moving if b != link and link in [0, *_ancestors(model, b)]]
        nearest = [b for b in below if not any(a in below for a in _ancestors(model, b)[:-1])]
        names = [model.joint(joint).name for body in nearest for joint in _movable(model, body)]
        if len(nearest) == 1 and not any(_GRIPPER.search(name) for name in names):
            link = nearest[0]
            continue
        if link == 0:
            raise SimForcingError(f"robot {source}: several arms; name the end-effector frame with ee")
        return int(model.body_parentid[nearest[0]]) if nearest else link


def _rest(model: mujoco.MjModel) -> Float64[np.ndarray, " nq"]:
    """Joint positions of the model at rest: its keyframe `home`, else the first keyframe, else `qpos0`."""
    names = [model.key(i).name for i in range(model.nkey)]
    if not names:
        return np.array(model.qpos0, dtype=np.float64)
    return np.array(model.key_qpos[names.index("home") if "home" in names else 0], dtype=np.float64)


def _home(
    model: mujoco.MjModel, rest: Float64[np.ndarray, " n"], limits: Float64[np.ndarray, "n 2"]
) -> Float64[np.ndarray, " n"]:
    """Arm joints of the rest keyframe, else the middle of the limits."""
    return np.asarray(np.clip(rest, *limits.T) if model.nkey else limits.mean(axis=1))


def _fingers(model: mujoco.MjModel, rest: Float64[np.ndarray, " nq"], chain: Sequence[int]) -> tuple[Finger, ...]:
    """Gripper joints, those below the last arm joint; opening one moves its link away from the others."""
    last = int(model.jnt_bodyid[chain[-1]])
    joints = [
        j
        for j in range(model.njnt)
        if j not in chain
        and int(model.jnt_type[j]) in _HINGE_SLIDE
        and last in _ancestors(model, int(model.jnt_bodyid[j]))
    ]
    data = mujoco.MjData(model)
    middle = {j: _range(model, j).mean() for j in joints}

    def centre(body: int) -> Float64[np.ndarray, " 3"]:
        geoms = [g for g in range(model.ngeom) if body in _ancestors(model, int(model.geom_bodyid[g]))]
        return data.geom_xpos[geoms].mean(axis=0) if geoms else np.array(data.xipos[body])

    if len(joints) == 1:  # a jaw against a fixed one opens with its angle
        low, high = (float(end) for end in _range(model, joints[0]))
        return (Finger(str(model.joint(joints[0]).name), low, high),)
    fingers = []
    for joint in joints:
        body = int(model.jnt_bodyid[joint])
        others = [int(model.jnt_bodyid[j]) for j in joints if j != joint]
        apart = []
        for end in _range(model, joint):
            data.qpos[:] = rest
            for j in joints:
                data.qpos[model.jnt_qposadr[j]] = end if j == joint else middle[j]
            mujoco.mj_kinematics(model, data)
            apart.append(float(np.linalg.norm(centre(body) - np.mean([centre(b) for b in others], axis=0))))
        low, high = (float(v) for v in _range(model, joint))
        ends = (low, high) if apart[1] >= apart[0] else (high, low)
        fingers.append(Finger(str(model.joint(joint).name), *ends))
    return tuple(fingers)


def _range(model: mujoco.MjModel, joint: int) -> Float64[np.ndarray, " 2"]:
    limited = bool(model.jnt_limited[joint])
    return np.array(model.jnt_range[joint] if limited else (-_UNLIMITED, _UNLIMITED), dtype=np.float64)
