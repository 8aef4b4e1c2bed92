"""LeRobot v2.1 and v2.0: one file an episode, the same episodes as v3.0."""

import json
import pickle
import shutil

import numpy as np
import pytest

from simforcing.data import REAL, SIM, open_dataset
from simforcing.errors import SimForcingError

VIDEO = "videos/chunk-000/{}/episode_000001.mp4"


def test_the_real_set_equals_its_v3_twin(shared):
    old, new = (open_dataset(shared / "data" / name) for name in ("lerobot_v21", "lerobot_v30"))
    assert (old.format, new.format) == ("LeRobot v2.1", "LeRobot v3.0")
    assert old.lengths == new.lengths and old.tasks == new.tasks and old.cameras == new.cameras
    assert old.action_convention == new.action_convention and old.state_convention.rotation == "euler_xyz"
    for a, b in zip(old, new, strict=True):
        np.testing.assert_array_equal(a.state, b.state)
        np.testing.assert_array_equal(a.action, b.action)
        key, rows = old.cameras[0], [0, a.length - 1, 7]
        assert np.abs(a.frames(key, rows).astype(int) - b.frames(key, rows)).mean() < 3  # encoded anew for v3.0


def test_a_window_does_not_decode_the_video(shared):
    episode = open_dataset(shared / "data" / "lerobot_v21")[2]
    footage = episode.decode.__self__.footage[episode.cameras[0]]
    episode.frames(episode.cameras[0], range(30, 43))
    assert footage.file.decoded <= 43 < episode.length  # the only keyframe is at the front


def test_episodes_can_be_pickled(as_v2):
    episode = pickle.loads(pickle.dumps(open_dataset(as_v2)[1]))
    assert episode.frames(SIM, [3]).shape == (1, 32, 48, 3)


@pytest.mark.parametrize("version", ["v2.1", "v2.0"])
def test_rewritten_as_v2_it_is_the_same(as_v2, dataset_path, version):
    info = json.loads((as_v2 / "meta/info.json").read_text())
    (as_v2 / "meta/info.json").write_text(json.dumps({**info, "codebase_version": version}))
    old, new = open_dataset(as_v2), open_dataset(dataset_path)
    assert old.lengths == new.lengths and old.tasks == new.tasks
    for a, b in zip(old, new, strict=True):
        np.testing.assert_array_equal(a.state, b.state)
        np.testing.assert_allclose(a.timestamps, b.timestamps, atol=1e-6)
        np.testing.assert_array_equal(a.frames(REAL, [0, 5]), b.frames(REAL, [0, 5]))


BROKEN = {
    "video gone": (lambda d: (d / VIDEO.format(SIM)).unlink(), r"episode_000001\.mp4: video file is missing"),
    "video empty": (lambda d: (d / VIDEO.format(SIM)).write_bytes(b""), "zero bytes"),
    "table gone": (
        lambda d: (d / "data/chunk-000/episode_000002.parquet").unlink(),
        r"episode_000002\.parquet: data file is missing",
    ),
    "other episode's table": (
        lambda d: shutil.copy(d / "data/chunk-000/episode_000000.parquet", d / "data/chunk-000/episode_000001.parquet"),
        r"episode 1 of .*: .*episode_000001\.parquet holds rows of episode 0",
    ),
    "other episode's video": (
        lambda d: shutil.copy(d / VIDEO.format(SIM).replace("1.mp4", "0.mp4"), d / VIDEO.format(SIM)),
        r"episode 1 of .*: 9 rows but 20 frames of observation\.images\.sim",
    ),
    "not JSON lines": (
        lambda d: (d / "meta/episodes.jsonl").write_text("{}\n{"),
        r"episodes\.jsonl, line 2: not JSON",
    ),
    "no length": (lambda d: (d / "meta/episodes.jsonl").write_text("{}\n"), "an episode has no episode_index"),
    "no tasks": (lambda d: (d / "meta/tasks.jsonl").unlink(), r"tasks\.jsonl: file is missing"),
    "tasks of another form": (lambda d: (d / "meta/tasks.jsonl").write_text('{"task": "x"}\n'), "needs task_index"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_dataset_says_what_and_where(as_v2, name):
    damage, message = BROKEN[name]
    damage(as_v2)
    with pytest.raises(SimForcingError, match=message) as caught:
        for episode in open_dataset(as_v2):
            episode.frames(SIM)
    assert "\n" not in str(caught.value) and str(as_v2) in str(caught.value)
