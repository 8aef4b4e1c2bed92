"""The bundled arms against the makers' robot descriptions, read here without any robotics library."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import mujoco
import numpy as np
import pytest

from simforcing.twin import arms

ARMS: dict[str, tuple[Callable[[], mujoco.MjSpec], str, str, tuple[str, str]]] = {
    "widowx250s": (arms.widowx250s, "widowx/wx250s.urdf", "ee_gripper_link", ("left_finger", "right_finger")),
    "panda": (
        arms.panda,
        "panda/panda.urdf",
        "panda_hand_tcp",
        ("panda_finger_joint1", "panda_finger_joint2"),
    ),
}


def _numbers(element: ET.Element | None, key: str) -> np.ndarray:
    text = "0 0 0" if element is None else element.get(key, "0 0 0")
    return np.array([float(x) for x in text.split()])


def _turn(axis: np.ndarray, angle: float) -> np.ndarray:
    """Rotation by `angle` about the unit vector `axis` (Rodrigues)."""
    x, y, z = axis
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    turn: np.ndarray = np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * (k @ k)
    return turn


class Chain:
    """Joints from the root of a URDF to one of its links."""

    def __init__(self, path: Path, tip: str) -> None:
        by_child = {j.find("child").get("link"): j for j in ET.parse(path).getroot().iter("joint")}  # type: ignore[union-attr]
        self.joints: list[ET.Element] = []
        while tip in by_child:
            self.joints.insert(0, by_child[tip])
            tip = by_child[tip].find("parent").get("link")  # type: ignore[union-attr,assignment]
        self.moving = [j for j in self.joints if j.get("type") in ("revolute", "prismatic")]

    def limits(self) -> np.ndarray:
        """[n, 2]"""
        rows = [j.find("limit") for j in self.moving]
        return np.array([[float(r.get("lower")), float(r.get("upper"))] for r in rows])  # type: ignore[union-attr,arg-type]

    def pose(self, q: np.ndarray) -> np.ndarray:
        """4x4 pose of the tip."""
        out, values = np.eye(4), iter(q)
        for joint in self.joints:
            roll, pitch, yaw = _numbers(joint.find("origin"), "rpy")
            step = np.eye(4)
            step[:3, 3] = _numbers(joint.find("origin"), "xyz")
            step[:3, :3] = (
                _turn(np.array([0, 0, 1.0]), yaw)
                @ _turn(np.array([0, 1.0, 0]), pitch)
                @ _turn(np.array([1.0, 0, 0]), roll)
            )
            if joint in self.moving:
                axis, value, move = _numbers(joint.find("axis"), "xyz"), next(values), np.eye(4)
                if joint.get("type") == "revolute":
                    move[:3, :3] = _turn(axis, value)
                else:
                    move[:3, 3] = axis * value
                step = step @ move
            out = out @ step
        return out


@pytest.mark.parametrize("name", ARMS)
def test_forward_kinematics_are_those_of_the_description(name: str, shared: Path) -> None:
    build, file, tip, _ = ARMS[name]
    chain = Chain(shared / "robots" / file, tip)
    model = build().compile()
    data = mujoco.MjData(model)
    limits = chain.limits()
    n = len(limits)
    np.testing.assert_allclose(model.jnt_range[:n], limits, atol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(50):
        q = rng.uniform(limits[:, 0], limits[:, 1])
        data.qpos[:n] = q
        mujoco.mj_kinematics(model, data)
        expected = chain.pose(q)
        assert np.linalg.norm(data.site("ee").xpos - expected[:3, 3]) < 1e-5
        np.testing.assert_allclose(data.site("ee").xmat.reshape(3, 3), expected[:3, :3], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "file", "frames"),
    [
        ("panda", "panda/panda.urdf", ("panda_link8", "panda_hand", "panda_hand_tcp")),
        ("widowx250s", "widowx/wx250s.urdf", ("ee_gripper_link",)),
    ],
)
def test_frames_that_datasets_report(name: str, file: str, frames: tuple[str, ...], shared: Path) -> None:
    model = ARMS[name][0]().compile()
    data = mujoco.MjData(model)
    for frame in frames:
        chain = Chain(shared / "robots" / file, frame)
        q = np.random.default_rng(1).uniform(*chain.limits().T)
        data.qpos[: len(q)] = q
        mujoco.mj_kinematics(model, data)
        expected = chain.pose(q)
        np.testing.assert_allclose(data.site(frame).xpos, expected[:3, 3], atol=1e-5)
        np.testing.assert_allclose(data.site(frame).xmat.reshape(3, 3), expected[:3, :3], atol=1e-5)


@pytest.mark.parametrize("name", ARMS)
def test_fingers_are_those_of_the_description(name: str, shared: Path) -> None:
    build, file, _, fingers = ARMS[name]
    model = build().compile()
    data = mujoco.MjData(model)
    for finger in fingers:
        joint = next(j for j in ET.parse(shared / "robots" / file).getroot().iter("joint") if j.get("name") == finger)
        link = joint.find("child").get("link")  # type: ignore[union-attr]
        chain = Chain(shared / "robots" / file, str(link))
        np.testing.assert_allclose(model.joint(finger).range, chain.limits()[-1], atol=1e-9)
        q = np.append(np.full(len(chain.moving) - 1, -0.2), chain.limits()[-1, 1])
        data.qpos[: len(q) - 1] = q[:-1]
        data.joint(finger).qpos[0] = q[-1]
        mujoco.mj_kinematics(model, data)
        body = model.jnt_bodyid[model.joint(finger).id]
        assert np.linalg.norm(data.xpos[body] - chain.pose(q)[:3, 3]) < 1e-5


@pytest.mark.parametrize("name", ARMS)
def test_names_actuators_and_self_support(name: str) -> None:
    build = ARMS[name][0]
    spec = build()
    model = spec.copy().compile()
    assert model.body("base").id == 1
    assert [model.actuator(i).name for i in range(model.nu)] == [model.joint(i).name for i in range(model.njnt)]
    assert {model.mat(i).name for i in range(model.nmat)} == set(arms.MATERIALS)
    data = mujoco.MjData(model)
    start = np.clip(
        np.full(model.nq, 0.3) * np.where(np.arange(model.nq) == 3, -4, 1),
        model.jnt_range[:, 0],
        model.jnt_range[:, 1],
    )
    data.qpos[:] = data.ctrl[:] = start
    mujoco.mj_step(model, data, 500)
    assert np.abs(data.qpos - start).max() < 2e-3, "the arm sags or runs away while it should hold still"


@pytest.mark.parametrize("name", ARMS)
def test_actuators_lag_visibly_but_modestly(name: str) -> None:
    model = ARMS[name][0]().compile()
    data = mujoco.MjData(model)
    model.opt.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    if name == "panda":
        data.qpos[:7] = (0.0, -0.3, 0.0, -2.2, 0.0, 2.0, 0.785)
    data.ctrl[:] = data.qpos
    goal = data.qpos[0] + 0.3
    data.ctrl[0] = goal
    mujoco.mj_step(model, data, round(0.05 / model.opt.timestep))
    assert abs(data.qpos[0] - goal) > 0.05, "reaches its goal at once"
    mujoco.mj_step(model, data, round(0.55 / model.opt.timestep))
    assert abs(data.qpos[0] - goal) < 0.01, "has not come to its goal after 0.6 s"


@pytest.mark.parametrize("name", ARMS)
def test_fingertips_surround_the_end_effector(name: str) -> None:
    build, _, _, fingers = ARMS[name]
    model = build().compile()
    data = mujoco.MjData(model)
    gaps = []
    for side in (0, 1):  # closed, open
        for finger in fingers:
            data.joint(finger).qpos[0] = model.joint(finger).range[side]
        mujoco.mj_kinematics(model, data)
        across = data.site("ee").xmat.reshape(3, 3)[:, 1]
        bodies = [int(model.jnt_bodyid[model.joint(f).id]) for f in fingers]
        geoms = [int(np.flatnonzero(model.geom_bodyid == b)[0]) for b in bodies]
        offsets = [float((data.geom_xpos[g] - data.site("ee").xpos) @ across) for g in geoms]
        assert offsets[0] == pytest.approx(-offsets[1], abs=1e-9)
        gaps.append(abs(offsets[0] - offsets[1]))
    assert gaps[1] - gaps[0] > 0.04, "an open gripper looks like a closed one"
