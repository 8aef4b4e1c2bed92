"""Cameras: poses, projection, files, and the coordinates in which one is searched for."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from simforcing.errors import SimForcingError
from simforcing.twin.camera import Camera
from simforcing.twin.search import Orbit, descend, distinct

EYE, TARGET = (1.0, -0.5, 0.6), (0.3, 0.1, 0.2)


def camera(**changes: float) -> Camera:
    return Camera.look_at(EYE, TARGET, fovy=changes.get("fovy", 50.0), height=96, width=160)


def test_target_is_seen_in_the_middle_and_up_is_up():
    middle, above = camera().project(np.array([TARGET, (*TARGET[:2], TARGET[2] + 0.1)]))
    assert middle == pytest.approx([80.0, 48.0])
    assert above[0] == pytest.approx(80.0)
    assert above[1] < 47.0


def test_a_point_behind_the_camera_has_no_pixel():
    behind = 2 * np.array(EYE) - np.array(TARGET)
    assert np.isnan(camera().project(behind[None])).all()


@pytest.mark.parametrize("fovy", [30.0, 75.0])
def test_half_the_field_of_view_reaches_the_border(fovy: float):
    seen = camera(fovy=fovy)
    edge = seen.pose[:3, 3] - seen.pose[:3, 2] + np.tan(np.radians(fovy / 2)) * seen.pose[:3, 1]
    assert seen.project(edge[None])[0] == pytest.approx([80.0, 0.0])


def test_file_round_trip_and_opencv_axes(tmp_path: Path):
    path = tmp_path / "camera.json"
    camera().save(path)
    assert Camera.load(path).pose == pytest.approx(camera().pose)
    stored = json.loads(path.read_text())
    stored["axes"] = "opencv"
    stored["pose"] = (camera().pose @ np.diag([1.0, -1.0, -1.0, 1.0])).tolist()
    path.write_text(json.dumps(stored))
    assert Camera.load(path).pose == pytest.approx(camera().pose)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("pose", np.diag([1.0, 1.0, -1.0, 1.0]).tolist(), "no rotation"),
        ("pose", [[1.0]], "4x4"),
        ("fovy_degrees", 175.0, "fovy is 175"),
        ("height", 0, "size is 0x160"),
        ("axes", "blender", "use opengl or opencv"),
        ("focal", 1.0, "unknown key 'focal'"),
        ("mirrored", 1, "mirrored is 1"),
    ],
)
def test_bad_files_are_one_line_with_the_name(tmp_path: Path, key: str, value: object, says: str):
    path = tmp_path / "camera.json"
    path.write_text(json.dumps({**camera().to_dict(), key: value}))
    with pytest.raises(SimForcingError, match=says) as caught:
        Camera.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mirrored_camera_sees_left_and_right_exchanged(tmp_path: Path):
    mirrored = replace(camera(), mirrored=True)
    mirrored.save(tmp_path / "camera.json")
    assert Camera.load(tmp_path / "camera.json").resized(192, 320).mirrored
    points = np.array([[0.4, 0.1, 0.2], [0.5, -0.2, 0.1]])
    plain, other = camera().project(points), mirrored.project(points)
    np.testing.assert_allclose(other, np.column_stack([camera().width - plain[:, 0], plain[:, 1]]))


def test_another_shape_is_refused():
    assert camera().resized(192, 320).height == 192
    with pytest.raises(SimForcingError, match="96x160 pictures"):
        camera().resized(128, 128)


coordinate = st.floats(-1.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[coordinate] * 7))
def test_search_coordinates_round_trip(drawn: tuple[float, ...]):
    orbit = Orbit(np.array([0.4, 0.1, 0.3]), 96, 160)
    x = np.array(drawn) * [3.0, 1.2, 0.8, 0.0, 0.5, 0.4, 0.5] + [0, 0, 0, np.log(1.0), 0, 0, 0]
    assert orbit.coordinates(orbit.camera(x)) == pytest.approx(x, abs=1e-9)


def test_search_coordinates_mean_what_they_say():
    pivot = np.array([0.4, 0.1, 0.3])
    orbit = Orbit(pivot, 96, 160)
    x = np.array([0.7, 0.3, np.log(0.9), np.log(1.1), 0.2, -0.1, 0.0])
    seen = orbit.camera(x)
    assert np.linalg.norm(seen.pose[:3, 3] - pivot) == pytest.approx(0.9)
    assert seen.pose[2, 3] - pivot[2] == pytest.approx(0.9 * np.sin(0.3))
    assert seen.project(pivot[None])[0] == pytest.approx([80 + 0.2 * 96, 48 + 0.1 * 96])
    nearer = orbit.camera(x - [0, 0, np.log(2), 0, 0, 0, 0])  # half as far and wider: the pivot's surroundings stay
    assert 0.5 / np.tan(np.radians(nearer.fovy / 2)) == pytest.approx(0.5 * 0.5 / np.tan(np.radians(seen.fovy / 2)))


def test_fixed_field_of_view_stays():
    orbit = Orbit(np.zeros(3), 96, 160, fovy=42.0)
    starts = orbit.starts(20, 1.0, np.random.default_rng(0))
    assert {round(orbit.camera(x).fovy, 9) for x in starts} == {42.0}


def test_upright_level_cameras_are_the_likely_ones():
    orbit = Orbit(np.array(TARGET), 96, 160)
    plain = orbit.unlikely(camera())
    turned = camera().pose.copy()
    turned[:3, :3] = turned[:3, :3] @ Rotation.from_euler("z", 40, degrees=True).as_matrix()
    up = Camera.look_at((1.0, -0.5, -0.6), TARGET, fovy=50.0, height=96, width=160)
    assert orbit.unlikely(Camera(turned, 50.0, 96, 160)) > plain + 5
    assert orbit.unlikely(up) > plain + 2


def test_descend_finds_a_minimum_and_repeats_itself():
    aim = np.array([0.1, -0.2, 0.3, 0.0, 0.1, 0.05, 0.0])

    def goal(x: np.ndarray) -> float:
        return float(((x - aim) ** 2).sum())

    found = [descend(goal, np.zeros(7), width=1.0, generations=45, population=12, seed=3) for _ in range(2)]
    assert found[0] == pytest.approx(aim, abs=1e-2)
    assert (found[0] == found[1]).all()


def test_distinct_keeps_the_first_of_neighbours_and_knows_that_angles_wrap():
    one = np.array([np.pi - 0.01, 0.3, 0, 0, 0, 0, 0])
    other_side = np.array([-np.pi + 0.01, 0.3, 0, 0, 0, 0, 0])
    far = np.array([0.0, 0.3, 0, 0, 0, 0, 0])
    kept = distinct([one, other_side, far], 5)
    assert [x[0] for x in kept] == [one[0], far[0]]
