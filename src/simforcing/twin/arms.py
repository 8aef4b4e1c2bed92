"""Two light arms that ship with the package: true kinematics, simple fat geometry, no meshes.

Joint origins, axes, limits and fixed offsets are those of the makers' robot descriptions (WidowX 250s:
Interbotix; Panda: Franka Emika). Link shapes are capsules, boxes and cylinders, chosen to be readable in a
64 x 64 picture. Lengths in metres, angles in radians, quaternions wxyz, masses from one density.

Names that both arms share: body `base`, site `ee` between the fingertips (WidowX: x points out of the
gripper; Panda: z points out of the gripper; y is the direction in which the fingers move), materials
`shell`, `joint`, `gripper`, `finger`, and one position actuator per joint that bears the joint's name.
The frames that datasets report are sites under the makers' names: `ee_gripper_link` of the WidowX (where `ee`
is), `panda_link8` (the flange: DROID's cartesian states), `panda_hand`, `panda_hand_tcp` and robosuite's `grip_site`
(LIBERO's states) of the Panda.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

MATERIALS: tuple[str, ...] = ("shell", "joint", "gripper", "finger")
ROLL = 3.141582653589793  # the WidowX 250s stops its roll joints just short of half a turn
DENSITY = 500.0  # kg/m^3 of every link shape: arms of 2 to 8 kg
_PALETTE: Mapping[str, tuple[float, float, float]] = {
    "shell": (0.62, 0.64, 0.67),
    "joint": (0.36, 0.38, 0.42),
    "gripper": (0.20, 0.21, 0.24),
    "finger": (0.93, 0.47, 0.13),
}


@dataclass(frozen=True)
class Gains:
    """Position actuator: torque `kp * (target - q) - kv * qvel`, at most `force` (N m; N for fingers)."""

    kp: float
    kv: float
    force: float


class _Builder:
    """Adds links one after another to a spec; each call returns the new body."""

    def __init__(self, name: str) -> None:
        self.spec = mujoco.MjSpec()
        self.spec.modelname = name
        self.spec.compiler.degree = False
        self.spec.compiler.autolimits = True
        for material in MATERIALS:
            self.spec.add_material(
                name=material, rgba=[*_PALETTE[material], 1.0], specular=0.25, shininess=0.35, reflectance=0.0
            )
        self.base = self.spec.worldbody.add_body(name="base")

    def link(
        self,
        parent: mujoco.MjsBody,
        name: str,
        pos: Sequence[float],
        *,
        quat: Sequence[float] = (1.0, 0.0, 0.0, 0.0),
        joint: str | None = None,
        axis: Sequence[float] = (0.0, 0.0, 1.0),
        limits: tuple[float, float] = (0.0, 0.0),
        gains: Gains | None = None,
        slide: bool = False,
    ) -> mujoco.MjsBody:
        """Body `name` at `pos`, `quat` in `parent`; with `joint`, one limited joint and its actuator."""
        body = parent.add_body(name=name, pos=pos, quat=quat, gravcomp=1.0)
        if joint is not None and gains is not None:
            kind = mujoco.mjtJoint.mjJNT_SLIDE if slide else mujoco.mjtJoint.mjJNT_HINGE
            body.add_joint(
                name=joint,
                type=kind,
                axis=axis,
                range=limits,
                armature=0.02 if slide else 0.05,
                damping=1.0 if slide else 0.5,
            )
            self.spec.add_actuator(
                name=joint,
                target=joint,
                trntype=mujoco.mjtTrn.mjTRN_JOINT,
                gaintype=mujoco.mjtGain.mjGAIN_FIXED,
                biastype=mujoco.mjtBias.mjBIAS_AFFINE,
                gainprm=[gains.kp, *[0.0] * 9],
                biasprm=[0.0, -gains.kp, -gains.kv, *[0.0] * 7],
                ctrlrange=limits,
                forcerange=(-gains.force, gains.force),
            )
        return body

    def capsule(
        self, body: mujoco.MjsBody, material: str, start: Sequence[float], end: Sequence[float], radius: float
    ) -> None:
        """Capsule from `start` to `end`, for the eye only."""
        self._geom(body, material, mujoco.mjtGeom.mjGEOM_CAPSULE, size=[radius, 0, 0], fromto=[*start, *end])

    def cylinder(
        self, body: mujoco.MjsBody, material: str, start: Sequence[float], end: Sequence[float], radius: float
    ) -> None:
        """Cylinder from `start` to `end`, for the eye only."""
        self._geom(body, material, mujoco.mjtGeom.mjGEOM_CYLINDER, size=[radius, 0, 0], fromto=[*start, *end])

    def box(
        self,
        body: mujoco.MjsBody,
        material: str,
        centre: Sequence[float],
        half: Sequence[float],
        *,
        touches: bool = False,
    ) -> None:
        """Box of half sizes `half`; with `touches` it collides (fingers and palm do)."""
        self._geom(body, material, mujoco.mjtGeom.mjGEOM_BOX, size=half, pos=centre, touches=touches)

    def _geom(
        self,
        body: mujoco.MjsBody,
        material: str,
        kind: mujoco.mjtGeom,
        *,
        touches: bool = False,
        **shape: Any,
    ) -> None:
        contact: dict[str, Any] = {"contype": 0, "conaffinity": 0}
        if touches:
            contact = {"contype": 2, "conaffinity": 1, "condim": 4, "friction": [1.6, 0.02, 0.001]}
        body.add_geom(type=kind, material=material, density=DENSITY, **contact, **shape)


_Vector = tuple[float, float, float]


@dataclass(frozen=True)
class _Joint:
    """A revolute joint: its name, the body that it moves, that body's place in the one before, axis and limits."""

    name: str
    body: str
    origin: _Vector
    axis: _Vector
    limits: tuple[float, float]
    gains: Gains


_STRONG, _WEAK = Gains(220.0, 12.0, 60.0), Gains(60.0, 3.0, 20.0)  # of the WidowX: arm and wrist
_WIDOWX: tuple[_Joint, ...] = (
    _Joint("waist", "shoulder_link", (0, 0, 0.072), (0, 0, 1), (-np.pi, np.pi), _STRONG),
    _Joint(
        "shoulder", "upper_arm_link", (0, 0, 0.03865), (0, 1, 0), (-1.8849555921538759, 1.9896753472735358), _STRONG
    ),
    _Joint(
        "elbow", "upper_forearm_link", (0.04975, 0, 0.25), (0, 1, 0), (-2.1467549799530254, 1.6057029118347832), _STRONG
    ),
    _Joint("forearm_roll", "lower_forearm_link", (0.175, 0, 0), (1, 0, 0), (-ROLL, ROLL), _WEAK),
    _Joint("wrist_angle", "wrist_link", (0.075, 0, 0), (0, 1, 0), (-1.7453292519943295, 2.1467549799530254), _WEAK),
    _Joint("wrist_rotate", "gripper_link", (0.065, 0, 0), (1, 0, 0), (-ROLL, ROLL), _WEAK),
)


def _frame(body: mujoco.MjsBody, name: str, pos: Sequence[float]) -> None:
    """A site that is not drawn, with the body's axes."""
    body.add_site(name=name, pos=pos, size=[0.004, 0, 0], group=4)


def widowx250s() -> mujoco.MjSpec:
    """WidowX 250s: six revolute joints, two finger slides (`left_finger`, `right_finger`: 15 to 37 mm)."""
    b = _Builder("widowx250s")
    links: list[mujoco.MjsBody] = [b.base]
    for j in _WIDOWX:
        links.append(b.link(links[-1], j.body, j.origin, joint=j.name, axis=j.axis, limits=j.limits, gains=j.gains))
    _widowx_shapes(b, links)
    hand = links[-1]
    for name in ("ee", "ee_gripper_link"):
        _frame(hand, name, (0.043 + 0.023 + 0.027575, 0, 0))
    for side, sign in (("left", 1.0), ("right", -1.0)):
        body = b.link(
            hand,
            f"{side}_finger_link",
            (0.043 + 0.023, 0, 0),
            joint=f"{side}_finger",
            axis=(0, sign, 0),
            limits=(0.015, 0.037),
            gains=Gains(900.0, 25.0, 14.0),
            slide=True,
        )
        b.box(body, "finger", (0.014, -sign * 0.005, 0), (0.031, 0.006, 0.012), touches=True)
    return b.spec


def _widowx_shapes(b: _Builder, links: Sequence[mujoco.MjsBody]) -> None:
    """Link shapes of the WidowX, each in the frame of its own joint."""
    base, shoulder, upper, forearm, lower, wrist, hand = links
    b.cylinder(base, "gripper", (0, 0, 0), (0, 0, 0.03), 0.075)
    b.cylinder(base, "joint", (0, 0, 0.03), (0, 0, 0.072), 0.048)
    b.cylinder(shoulder, "shell", (0, 0, 0), (0, 0, 0.03), 0.046)
    b.cylinder(shoulder, "joint", (0, -0.052, 0.03865), (0, 0.052, 0.03865), 0.037)
    b.capsule(upper, "shell", (0, 0, 0.02), (0, 0, 0.25), 0.029)
    b.capsule(upper, "shell", (0, 0, 0.25), (0.04975, 0, 0.25), 0.026)
    b.cylinder(forearm, "joint", (0, -0.042, 0), (0, 0.042, 0), 0.034)
    b.capsule(forearm, "shell", (0.02, 0, 0), (0.165, 0, 0), 0.026)
    b.cylinder(lower, "joint", (-0.006, 0, 0), (0.014, 0, 0), 0.030)
    b.capsule(lower, "shell", (0.02, 0, 0), (0.06, 0, 0), 0.024)
    b.cylinder(wrist, "joint", (0, -0.034, 0), (0, 0.034, 0), 0.027)
    b.capsule(wrist, "shell", (0.01, 0, 0), (0.05, 0, 0), 0.021)
    b.cylinder(hand, "joint", (-0.012, 0, 0), (0.012, 0, 0), 0.026)
    b.box(hand, "gripper", (0.032, 0, 0), (0.020, 0.048, 0.021), touches=True)


def panda() -> mujoco.MjSpec:
    """Franka Panda: seven revolute joints, two finger slides (`panda_finger_joint1/2`, 0 to 0.04 m each)."""
    b = _Builder("panda")
    s = float(np.sqrt(0.5))
    back, forth = (s, -s, 0.0, 0.0), (s, s, 0.0, 0.0)  # rotations about x by -90 and +90 degrees
    b.cylinder(b.base, "gripper", (0, 0, 0), (0, 0, 0.05), 0.12)
    b.cylinder(b.base, "shell", (0, 0, 0.05), (0, 0, 0.18), 0.075)
    chain: list[tuple[tuple[float, ...], tuple[float, ...], tuple[float, float], float]] = [
        # origin, rotation, limits, actuator stiffness
        ((0, 0, 0.333), (1.0, 0.0, 0.0, 0.0), (-2.8973, 2.8973), 900.0),
        ((0, 0, 0), back, (-1.7628, 1.7628), 900.0),
        ((0, -0.316, 0), forth, (-2.8973, 2.8973), 700.0),
        ((0.0825, 0, 0), forth, (-3.0718, -0.0698), 700.0),
        ((-0.0825, 0.384, 0), back, (-2.8973, 2.8973), 300.0),
        ((0, 0, 0), forth, (-0.0175, 3.7525), 300.0),
        ((0.088, 0, 0), forth, (-2.8973, 2.8973), 200.0),
    ]
    links: list[mujoco.MjsBody] = [b.base]
    for i, (pos, quat, limits, kp) in enumerate(chain, start=1):
        gains = Gains(kp, 0.055 * kp, 120.0)
        links.append(b.link(links[-1], f"link{i}", pos, quat=quat, joint=f"panda_joint{i}", limits=limits, gains=gains))
    _panda_shapes(b, links)

    hand_quat = (float(np.cos(-np.pi / 8)), 0.0, 0.0, float(np.sin(-np.pi / 8)))
    hand = b.link(links[7], "hand", (0, 0, 0.107), quat=hand_quat)
    b.box(hand, "gripper", (0, 0, 0.035), (0.030, 0.105, 0.032), touches=True)
    _frame(links[7], "panda_link8", (0, 0, 0.107))
    _frame(hand, "panda_hand", (0, 0, 0))
    for name in ("ee", "panda_hand_tcp"):
        _frame(hand, name, (0, 0, 0.1034))
    _frame(hand, "grip_site", (0, 0, 0.0965))
    for number, sign in ((1, 1.0), (2, -1.0)):
        body = b.link(
            hand,
            f"finger{number}",
            (0, 0, 0.0584),
            joint=f"panda_finger_joint{number}",
            axis=(0, sign, 0),
            limits=(0.0, 0.04),
            gains=Gains(1200.0, 40.0, 30.0),
            slide=True,
        )
        b.box(body, "finger", (0, sign * 0.010, 0.028), (0.014, 0.010, 0.027), touches=True)
    return b.spec


def _panda_shapes(b: _Builder, links: Sequence[mujoco.MjsBody]) -> None:
    """Link shapes of the Panda, each in the frame of its own joint."""
    b.cylinder(links[1], "shell", (0, 0, -0.16), (0, 0, -0.06), 0.060)
    b.cylinder(links[1], "joint", (0, -0.075, 0), (0, 0.075, 0), 0.065)
    b.capsule(links[2], "shell", (0, 0, 0), (0, -0.20, 0), 0.058)
    b.cylinder(links[3], "joint", (0, 0, -0.11), (0, 0, -0.08), 0.060)
    b.capsule(links[3], "shell", (0, 0, -0.06), (0.0825, 0, 0), 0.056)
    b.cylinder(links[4], "joint", (0, 0, -0.075), (0, 0, 0.075), 0.060)
    b.capsule(links[4], "shell", (0, 0, 0), (-0.0825, 0.12, 0), 0.054)
    b.cylinder(links[5], "joint", (0, 0, -0.26), (0, 0, -0.23), 0.056)
    b.capsule(links[5], "shell", (0, 0, -0.21), (0, 0, 0), 0.050)
    b.cylinder(links[6], "joint", (0, 0, -0.065), (0, 0, 0.065), 0.052)
    b.capsule(links[6], "shell", (0, 0, 0), (0.088, 0, 0), 0.046)
    b.cylinder(links[7], "joint", (0, 0, 0), (0, 0, 0.10), 0.046)
