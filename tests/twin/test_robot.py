"""Robots from files: kinematics against independent ones, inverse kinematics, bad files."""

import json
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from simforcing.errors import SimForcingError
from simforcing.twin.camera import Camera, default_camera
from simforcing.twin.robot import Robot

ARM = """<mujoco><compiler angle="radian"/><worldbody>
  <geom name="floor" type="plane" size="1 1 .1"/>
  <body name="stand" pos="1 2 .3" euler="0 0 1.57">
    <geom type="cylinder" size=".05 .05"/>
    <body name="upper" pos="0 0 .1"><joint name="turn" axis="0 0 1" range="-2 2"/>
      <geom type="capsule" size=".03" fromto="0 0 0 0 0 .2"/>
      <body name="fore" pos="0 0 .2"><joint name="bend" axis="0 1 0" range="-2 2"/>
        <geom type="capsule" size=".03" fromto="0 0 0 .2 0 0"/>
        <body name="palm" pos=".2 0 0"><joint name="wrist" axis="0 1 0" range="-2 2"/>
          <geom type="box" size=".02 .05 .02"/><site name="point" pos=".05 0 0"/>
          <body name="left" pos=".03 .02 0"><joint name="l" type="slide" axis="0 1 0" range="-.015 .02"/>
            <geom type="box" size=".03 .005 .01"/></body>
          <body name="right" pos=".03 -.02 0"><joint name="r" type="slide" axis="0 1 0" range="-.02 .015"/>
            <geom type="box" size=".03 .005 .01"/></body>
  </body></body></body></body></worldbody>
  <keyframe><key name="home" qpos="0 .5 .5 0 0"/></keyframe></mujoco>"""


def urdf_chain(path: Path, tip: str, q: dict[str, float]) -> np.ndarray:
    """Pose of link `tip` in the root link, straight from the URDF's numbers."""
    joints = {j.find("child").get("link"): j for j in ET.parse(path).getroot().findall("joint")}

    def numbers(text: str | None, default: str) -> np.ndarray:
        return np.array([float(x) for x in (text or default).split()])

    pose = np.eye(4)
    while tip in joints:
        joint = joints[tip]
        origin = joint.find("origin")
        here = np.eye(4)
        here[:3, 3] = numbers(origin.get("xyz"), "0 0 0")
        here[:3, :3] = Rotation.from_euler("xyz", numbers(origin.get("rpy"), "0 0 0")).as_matrix()
        value = q.get(joint.get("name"), 0.0)
        move = np.eye(4)
        if joint.get("type") in ("revolute", "continuous"):
            move[:3, :3] = Rotation.from_rotvec(value * numbers(joint.find("axis").get("xyz"), "1 0 0")).as_matrix()
        pose = here @ move @ pose
        tip = joint.find("parent").get("link")
    return pose


@pytest.fixture(scope="module")
def panda(shared: Path) -> Robot:
    return Robot.load(shared / "robots/panda/panda.urdf")


@pytest.fixture(scope="module")
def widowx(shared: Path) -> Robot:
    return Robot.load(shared / "robots/widowx/wx250s.urdf")


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    path = tmp_path / "arm.xml"
    path.write_text(ARM)
    return path


@pytest.mark.parametrize(("name", "count", "tip"), [("panda", 7, "panda_link8"), ("widowx", 6, "ee_gripper_link")])
def test_fk_equals_the_chain_in_the_urdf(name: str, count: int, tip: str, request: pytest.FixtureRequest) -> None:
    robot: Robot = request.getfixturevalue(name)
    assert robot.ee_name == tip
    assert len(robot.joint_names) == count
    random = np.random.default_rng(0)
    for q in random.uniform(*robot.limits.T, size=(20, count)):
        want = urdf_chain(Path(robot.source), tip, dict(zip(robot.joint_names, q, strict=True)))
        np.testing.assert_allclose(robot.fk(q), want, atol=1e-9)


def test_chosen_frame_moves_the_pose_by_its_offset(panda: Robot) -> None:
    tcp = Robot.load(panda.source, ee="panda_hand_tcp")
    between = np.linalg.inv(panda.fk(panda.home)) @ tcp.fk(panda.home)
    np.testing.assert_allclose(between[:3, 3], [0, 0, 0.1034], atol=1e-9)
    assert Rotation.from_matrix(between[:3, :3]).as_rotvec()[2] == pytest.approx(-np.pi / 4)


@pytest.mark.parametrize("name", ["panda", "widowx"])
def test_ik_returns_to_reachable_poses(name: str, request: pytest.FixtureRequest) -> None:
    robot: Robot = request.getfixturevalue(name)
    random = np.random.default_rng(1)
    low, high = robot.limits.T
    targets = robot.fk_path(random.uniform(low, high, size=(25, len(low))))
    answer = robot.ik(targets)
    back = robot.fk_path(answer.q)
    miss = np.linalg.norm(back[:, :3, 3] - targets[:, :3, 3], axis=1)
    turn = (Rotation.from_matrix(back[:, :3, :3]) * Rotation.from_matrix(targets[:, :3, :3]).inv()).magnitude()
    assert miss.max() < 1e-3
    assert np.degrees(turn.max()) < 0.1
    np.testing.assert_allclose(miss, answer.position_error, atol=1e-9)
    assert ((answer.q >= low) & (answer.q <= high)).all()


def test_ik_follows_a_path_smoothly(panda: Robot) -> None:
    ways = np.linspace(0, 1, 40)[:, None]
    q = panda.home + ways * np.array([0.5, -0.3, 0.2, -0.4, 0.2, 0.3, 0.5])
    answer = panda.ik(panda.fk_path(q))
    assert answer.position_error.max() < 1e-3
    assert np.abs(np.diff(answer.q, axis=0)).max() < 0.1
    assert not answer.at_limit.any()


def test_ik_reports_what_is_out_of_reach(panda: Robot) -> None:
    targets = np.stack([panda.fk(panda.home)] * 3)
    targets[1, 0, 3] = 2.0
    answer = panda.ik(targets)
    assert answer.position_error[1] > 0.7
    assert answer.position_error[[0, 2]].max() < 1e-3
    assert answer.at_limit.shape == (3,)


def test_ik_at_a_joint_limit_says_so(arm: Path) -> None:
    robot = Robot.load(arm)
    answer = robot.ik(robot.fk(np.array([2.0, 0.4, 0.3]))[None])
    assert answer.position_error[0] < 1e-3
    assert answer.at_limit[0]


@pytest.mark.parametrize("targets", [np.zeros((4, 4)), np.full((2, 4, 4), np.nan)])
def test_ik_refuses_what_is_no_pose(panda: Robot, targets: np.ndarray) -> None:
    with pytest.raises(SimForcingError, match="finite targets"):
        panda.ik(targets)


def test_gripper_opens(panda: Robot, widowx: Robot) -> None:
    assert panda.finger_positions(1.0) == {"panda_finger_joint1": 0.04, "panda_finger_joint2": 0.04}
    assert panda.finger_positions(-3.0) == {"panda_finger_joint1": 0.0, "panda_finger_joint2": 0.0}
    assert widowx.finger_positions(0.5) == {
        "left_finger": pytest.approx(0.026),
        "right_finger": pytest.approx(0.026),
    }


def test_mjcf_poses_are_relative_to_the_stand(arm: Path) -> None:
    robot = Robot.load(arm)
    assert (robot.ee_name, robot.base_name) == ("palm", "stand")
    assert robot.joint_names == ("turn", "bend", "wrist")
    np.testing.assert_allclose(robot.home, [0, 0.5, 0.5])
    np.testing.assert_allclose(robot.fk(np.zeros(3))[:3, 3], [0.2, 0, 0.3], atol=1e-12)
    assert robot.finger_positions(1.0) == {"l": pytest.approx(0.02), "r": pytest.approx(-0.02)}
    point = Robot.load(arm, ee="point")
    np.testing.assert_allclose(point.fk(np.zeros(3))[:3, 3], [0.25, 0, 0.3], atol=1e-12)


def test_urdf_finds_package_meshes_and_a_jaw(shared: Path, tmp_path: Path) -> None:
    mesh = shared / "robots/panda/franka_description/meshes/collision"
    for folder, name in (("a", "link1.stl"), ("b", "link7.stl")):  # two files of the same name
        (tmp_path / "pkg" / folder).mkdir(parents=True)
        shutil.copy(mesh / name, tmp_path / "pkg" / folder / "m.stl")
    path = tmp_path / "pkg" / "robot.urdf"
    path.write_text("""<robot name="r"><link name="base"><visual><geometry>
        <mesh filename="package://pkg/a/m.stl"/></geometry></visual></link>
      <joint name="spin" type="continuous"><parent link="base"/><child link="arm"/><axis xyz="0 0 1"/></joint>
      <link name="arm"><visual><geometry><mesh filename="package://pkg/b/m.stl"/></geometry></visual></link>
      <joint name="jaw" type="revolute"><parent link="arm"/><child link="tip"/><axis xyz="1 0 0"/>
        <origin xyz="0 0 0.2"/><limit lower="-0.2" upper="1.5" effort="1" velocity="1"/></joint>
      <link name="tip"><visual><geometry><box size="0.02 0.02 0.1"/></geometry></visual></link></robot>""")
    robot = Robot.load(path)
    assert robot.joint_names == ("spin",)
    assert robot.ee_name == "arm"
    assert robot.finger_positions(1.0) == {"jaw": 1.5}
    vertices = robot.model.mesh_vertnum
    assert len(vertices) == 2
    assert vertices[0] != vertices[1]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("nothing.urdf", None, "no such file"),
        ("notes.txt", "hello", "not a robot model"),
        ("broken.urdf", "<robot><link name='a'></robot>", "not an XML file"),
        ("page.urdf", "<html/>", "no <robot> with links"),
        ("empty.xml", "", "empty file"),
        ("meshless.xml", "<mujoco><asset><mesh file='gone.stl'/></asset></mujoco>", "gone.stl"),
        (
            "still.xml",
            "<mujoco><worldbody><body><geom size='1'/></body></worldbody></mujoco>",
            "no movable joints",
        ),
        (
            "still.urdf",
            "<robot name='r'><link name='a'/><link name='b'/><joint name='f' type='fixed'>"
            "<parent link='a'/><child link='b'/></joint></robot>",
            "no movable joints",
        ),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(SimForcingError, match=says) as caught:
        Robot.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_meshes_are_listed(shared: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(shared / "robots/panda/panda.urdf", tmp_path))
    with pytest.raises(SimForcingError, match=r"collision/link0\.stl.* and 15 more; put them beside the URDF"):
        Robot.load(path)


@pytest.fixture
def menagerie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for MuJoCo Menagerie's files, which its own package reads."""
    pytest.importorskip("mujoco_menagerie", reason="needs the optional package mujoco-menagerie")
    folder = tmp_path / "menagerie" / "franka_emika_panda"
    folder.mkdir(parents=True)
    (folder / "panda.xml").write_text(ARM)
    monkeypatch.setenv("MENAGERIE_ROOT", str(folder.parent))
    return folder.parent


def test_menagerie_names_are_loaded(menagerie: Path) -> None:
    robot = Robot.load("franka_emika_panda", ee="point")
    assert robot.joint_names == ("turn", "bend", "wrist")
    assert robot.origin == str(menagerie / "franka_emika_panda/panda.xml")
    assert Robot.load("franka_emika_panda:panda").sha256 == robot.sha256
    with pytest.raises(SimForcingError, match=r"near it: .*franka_emika_panda"):
        Robot.load("franka_emika_pandas")
    with pytest.raises(SimForcingError, match=r"franka_emika_panda has the models hand, .*panda_nohand"):
        Robot.load("franka_emika_panda:pandas")


def test_menagerie_without_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco_menagerie", reason="needs the optional package mujoco-menagerie")
    monkeypatch.setenv("MENAGERIE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MENAGERIE_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # it tries again a few times
    with pytest.raises(SimForcingError, match=r"'franka_emika_panda': not downloaded yet, and .* cannot be reached"):
        Robot.load("franka_emika_panda")


def test_menagerie_names_need_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_menagerie", None)
    with pytest.raises(SimForcingError, match=r"'franka_emika_panda': no such file, .* pip install mujoco-menagerie"):
        Robot.load("franka_emika_panda")


def test_bundled_panda_reports_the_frame_of_droid(shared: Path) -> None:
    bundled, maker = Robot.load("panda"), Robot.load(shared / "robots/panda/panda.urdf")
    assert bundled.ee_name == maker.ee_name == "panda_link8"
    for q in np.random.default_rng(2).uniform(*maker.limits.T, size=(5, 7)):
        np.testing.assert_allclose(bundled.fk(q), maker.fk(q), atol=1e-6)


def test_surface_points_enclose_what_moves(panda: Robot) -> None:
    points = panda.surface_points(panda.home, 1.0, size=1.0)
    hand = panda.frame_poses(panda.home)["panda_hand_tcp"][:3, 3]
    assert np.linalg.norm(points - hand, axis=1).min() < 0.05
    assert (points.max(axis=0) - points.min(axis=0)).max() < 1.3
    turned = panda.home.copy()
    turned[0] += 0.5  # about the base: the arm turns, points with it
    turn = Rotation.from_rotvec([0, 0, 0.5]).as_matrix()
    np.testing.assert_allclose(panda.surface_points(turned, 1.0, size=1.0), points @ turn.T, atol=1e-9)


def test_unknown_frame_lists_the_known(arm: Path) -> None:
    with pytest.raises(SimForcingError, match="no body or site 'claw'; it has fore, left, palm, point"):
        Robot.load(arm, ee="claw")
    with pytest.raises(SimForcingError, match="no movable joints before 'stand'"):
        Robot.load(arm, ee="stand")


def test_camera_file_round_trip_and_projection(tmp_path: Path) -> None:
    camera = Camera.look_at((1.0, 0.0, 0.5), (0.0, 0.0, 0.5), fovy=90.0, height=100, width=200)
    camera.save(tmp_path / "camera.json")
    again = Camera.load(tmp_path / "camera.json")
    np.testing.assert_array_equal(again.pose, camera.pose)
    points = np.array([[0.0, 0.0, 0.5], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0], [2.0, 0.0, 0.5]])
    pixels = again.project(points)
    np.testing.assert_allclose(pixels[:3], [[100, 50], [125, 50], [100, 25]])  # +y is to the right, +z up
    assert np.isnan(pixels[3]).all()
    stored = camera.to_dict()
    stored["pose"] = (camera.pose @ np.diag([1.0, -1.0, -1.0, 1.0])).tolist()
    np.testing.assert_allclose(Camera.from_dict({**stored, "axes": "opencv"}).pose, camera.pose)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fovy": 50}, "unknown key 'fovy'"),
        ({"pose": [[1, 0], [0, 1]]}, "4x4"),
        ({"pose": (2 * np.eye(4)).tolist()}, "no rotation"),
        ({"fovy_degrees": 0}, "1 to 170"),
        ({"fovy_degrees": "wide"}, "no number"),
        ({"axes": "unity"}, "opengl or opencv"),
        ({"width": 0}, "positive"),
    ],
)
def test_bad_camera_files(tmp_path: Path, change: dict[str, object], says: str) -> None:
    good = Camera.look_at((1, 1, 1), (0, 0, 0), fovy=50.0, height=48, width=64).to_dict()
    path = tmp_path / "camera.json"
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(SimForcingError, match=says) as caught:
        Camera.load(path)
    assert str(path) in str(caught.value)


def test_camera_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="cannot be read"):
        Camera.load(tmp_path / "camera.json")
    (tmp_path / "camera.json").write_text("{")
    with pytest.raises(SimForcingError, match="not JSON"):
        Camera.load(tmp_path / "camera.json")


def test_default_camera_sees_the_hand(widowx: Robot) -> None:
    camera = default_camera(widowx, 320, 192)
    column, row = camera.project(widowx.fk(widowx.home)[None, :3, 3])[0]
    assert 0 < column < 320
    assert 0 < row < 192
    with pytest.raises(SimForcingError, match="192x320 pictures, but these are 256x256"):
        camera.resized(256, 256)
