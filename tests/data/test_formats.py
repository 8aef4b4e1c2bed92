"""Bridge RLDS, DROID JSON, Bridge npz, and the paired layout: real sets, and small ones made here."""

import json
import shutil

import numpy as np
import pytest

from simforcing.data import REAL, SIM, open_dataset
from simforcing.errors import SimForcingError

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000002000000020802000000fdd49a730000001649444154789c636c6868606060"
    "606260606060600000122a0184cf008eae0000000049454e44ae426082"
)


def test_bridge_rlds(shared):
    data = open_dataset(shared / "data" / "bridge_rlds")
    assert (data.format, len(data), set(data.lengths), data.fps) == ("RLDS (tfrecord)", 25, {10}, 5.0)
    assert [key.rsplit(".", 1)[1] for key in data.cameras] == ["image_0", "image_1", "image_2", "image_3"]
    assert data.tasks[0] == "put cup from counter or drying rack into sink"
    episode, convention = data[0], data.action_convention
    assert (convention.kind, convention.relative_to, convention.rotation) == ("delta", "state", "euler_xyz")
    assert episode.state.shape == episode.action.shape == (10, 7)
    np.testing.assert_allclose(episode.state[0, :3], [0.2338, 0.1124, 0.1750], atol=1e-4)
    pictures = episode.frames(data.cameras[0], [9, 0])
    assert pictures.shape == (2, 64, 64, 3) and pictures.std() > 20
    assert episode.frames(data.cameras[3]).max() == 0
    # the deltas add up to the states, two rows later
    step = np.diff(np.concatenate([e.state[:, :3] for e in data]), axis=0)
    told = np.concatenate([e.action[:, :3] for e in data])
    inside = np.tile([1] * 8 + [0, 0], 25).astype(bool)[:-2]
    assert np.corrcoef(told[:-2][inside].ravel(), step[1:][inside].ravel())[0, 1] > 0.8


def test_rlds_with_actions_in_parts(write_rlds, tmp_path):
    data = open_dataset(write_rlds(tmp_path / "d"))
    assert data.lengths == (5, 7) and data.cameras == ("observation.images.image",) and data.tasks[1] == "lift it"
    expected = np.random.default_rng(1).normal(size=21).reshape(7, 3)
    np.testing.assert_allclose(data[1].action[:, :3], expected, rtol=1e-6)
    assert data[1].action.shape == (7, 7) and (data[1].action[:, 6] == 1).all()


def test_rlds_in_a_version_folder(write_rlds, tmp_path):
    (tmp_path / "d").mkdir()
    write_rlds(tmp_path / "d" / "0.1.0")
    assert len(open_dataset(tmp_path / "d")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps/observation/state": np.ones(12)}, "steps/observation/state has 12 values in 5 steps"),
        ({"steps/observation/state": np.full(35, np.nan)}, "values that are missing or not finite"),
        ({"steps/observation/image": [PNG] * 4}, "5 rows but 4 frames of observation.images.image"),
        ({"steps/observation/image": [PNG] * 4 + [PNG[:44]]}, "picture 4 of .* cannot be decoded"),
        ({"steps/action/world_vector": np.ones(0)}, "no action in"),
    ],
)
def test_broken_rlds(write_rlds, tmp_path, changes, message):
    with pytest.raises(SimForcingError, match=message):
        open_dataset(write_rlds(tmp_path / "d", (5,), **changes))[0].frames("observation.images.image")


def test_droid_json(shared):
    data = open_dataset(shared / "data" / "droid")
    assert data.format == "DROID JSON" and data.lengths == (56, 89, 80, 124, 39, 33, 121, 72)
    assert data.action_convention.gripper == "closed_positive" and data.action_convention.rotation == "euler_xyz"
    twin = open_dataset(shared / "data" / "lerobot_v21")  # made from episodes 199, 18599 and 1
    for mine, other in zip((5, 7, 1), twin, strict=True):
        np.testing.assert_allclose(data[mine].state, other.state, atol=1e-6)
        np.testing.assert_allclose(data[mine].action, other.action, atol=1e-6)
        assert data[mine].task == other.task
        for key, name in enumerate(("exterior_1", "exterior_2", "wrist")):
            ours = data[mine].frames(f"observation.images.camera_{key}", [4, 20])
            np.testing.assert_array_equal(ours, other.frames(f"observation.images.{name}", [4, 20]))


def test_droid_without_actions_is_refused(shared):
    data = open_dataset(shared / "data/odd/droid_no_actions")
    with pytest.raises(SimForcingError, match=r"episode 0 of .*0006\.json\): no action in .*0006\.json"):
        data[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(states=c["states"][:-2]), r"lengths disagree \(state 31, action 33"),
        (lambda c: c["states"][3].__setitem__(2, float("nan")), r"not finite \(row 3"),
        (lambda c: c["states"][3].pop(), "states are no rows of numbers"),
        (
            lambda c: c.update(videos=[{"video_path": "videos/train/199/7.mp4"}]),
            r"videos/199/7\.mp4: video file is missing",
        ),
    ],
)
def test_broken_droid_json(shared, tmp_path, change, message):
    source, root = shared / "data" / "droid", tmp_path / "d"
    shutil.copytree(source / "videos" / "199", root / "videos" / "199")
    (root / "annotation").mkdir()
    content = json.loads((source / "annotation/199.json").read_text())
    change(content)
    (root / "annotation/199.json").write_text(json.dumps(content))
    with pytest.raises(SimForcingError, match=message):
        open_dataset(root)[0]


def test_bridge_npz(shared):
    data = open_dataset(shared / "data" / "bridge")
    assert data.lengths == (40, 41, 31, 41, 27, 49, 49) and data.state_names == () and set(data.tasks) == {""}
    episode = data[6]
    raw = np.load(shared / "data/bridge/000000009.npz")["arr_0"]
    np.testing.assert_allclose(episode.action[:, :3] * 35, raw[:, :3], atol=1e-6)
    np.testing.assert_allclose(episode.action[:, 3:6] * 5.6, raw[:, 3:6], atol=1e-6)
    assert episode.state.shape == (49, 0) and set(np.unique(episode.action[:, 6])) == {-1.0, 1.0}
    np.testing.assert_allclose(episode.timestamps[-1], 48 / 5)
    every = episode.frames(REAL)
    np.testing.assert_array_equal(episode.frames(REAL, [48, 3]), every[[48, 3]])


def test_bridge_npz_of_another_content(write_video, tmp_path, frames):
    np.savez(tmp_path / "a.npz", other=np.zeros((3, 7)))
    write_video(tmp_path / "a.mp4", frames(3, 32, 48))
    with pytest.raises(SimForcingError, match=r"no arr_0 of \[N, 10\] in .*a\.npz \(there are: {'other': \[3, 7\]}\)"):
        open_dataset(tmp_path)[0]
    (tmp_path / "a.npz").write_bytes(b"PK")
    with pytest.raises(SimForcingError, match="cannot be read as npz"):
        open_dataset(tmp_path)[0]


@pytest.mark.parametrize("fps", [5.0, 10.0])
def test_paired_layout_is_two_cameras(write_paired, tmp_path, frames, fps):
    data = open_dataset(write_paired(tmp_path / "d", fps=fps))
    assert data.format == "paired MP4 [sim|real]" and data.cameras == (REAL, SIM) and data.lengths == (12, 9)
    episode = data[1]
    rows = np.random.default_rng(1).normal(size=(2, 9, 7)).astype(np.float32)
    np.testing.assert_array_equal(episode.action, rows[0])
    np.testing.assert_array_equal(episode.state, rows[1])
    assert np.abs(episode.frames(SIM, [8, 2]).astype(int) - frames(9, 32, 48, 1)[[8, 2]]).mean() < 4
    assert np.abs(episode.frames(REAL, [8, 2]).astype(int) - frames(9, 32, 48, 3)[[8, 2]]).mean() < 4
    assert (episode.task, data.action_convention.gripper_range) == ("do 1", (-1.0, 1.0))


@pytest.mark.parametrize(("video", "usable"), [(7, 7), (15, 9)])
def test_paired_layout_uses_what_rows_and_video_share(write_paired, tmp_path, video, usable):
    data = open_dataset(write_paired(tmp_path / "d", (9,), video))
    assert data.lengths == (usable,) and data[0].action.shape == (usable, 7)
    assert len(data[0].frames(REAL)) == usable


def test_paired_layout_broken(write_paired, tmp_path):
    root = write_paired(tmp_path / "d")
    (root / "data/episode_1.npz").rename(root / "data/gone")
    with pytest.raises(SimForcingError, match=r"episode 1 of .* \(number 1\): .*episode_1\.npz is missing"):
        open_dataset(root)
    (root / "data/gone").rename(root / "data/episode_1.npz")
    np.savez(root / "data/episode_0.npz", action=np.zeros((11, 7)), state=np.zeros((11, 7)))
    with pytest.raises(SimForcingError, match="num_steps is 12 but state has 11 rows"):
        open_dataset(root)[0]
    (root / "videos/1.mp4").unlink()
    with pytest.raises(SimForcingError, match=r"videos/1\.mp4: video file is missing"):
        open_dataset(root)
    (root / "meta/episodes.jsonl").write_text("")
    with pytest.raises(SimForcingError, match="no episodes in it"):
        open_dataset(root)
