"""Writing LeRobot v3.0: what comes back, what the official layout has, and that it is all or nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simforcing.data import REAL, SIM, ActionConvention, LeRobotWriter, open_dataset
from simforcing.errors import SimForcingError

EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def psnr(a, b):
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b.astype(float)) ** 2), 1e-9))


def files(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_round_trip(write_dataset, frames, vectors, tmp_path):
    convention = ActionConvention("delta", "state", "tool", "euler_xyz", "closed_positive", (-1.0, 1.0), 5.0)
    meta = {"action": convention.to_dict(), "camera": {"fovy": 40.5}}
    dataset = open_dataset(write_dataset(tmp_path / "d", meta=meta))
    assert (dataset.fps, dataset.robot, dataset.cameras) == (5.0, "widowx250s", (REAL, SIM))
    assert dataset.meta == meta and dataset.action_convention == convention
    for k, episode in enumerate(dataset):
        np.testing.assert_array_equal(episode.state, vectors(episode.length, k))
        np.testing.assert_array_equal(episode.action, vectors(episode.length, 100 + k))
        assert episode.state.dtype == episode.action.dtype == np.float32 and episode.state.flags.writeable
        assert episode.task == f"task {k % 2}"
        np.testing.assert_allclose(episode.timestamps, np.arange(episode.length) / 5, atol=1e-6)
        for key, phase in ((REAL, k), (SIM, k + 0.5)):
            assert psnr(episode.frames(key), frames(episode.length, 32, 48, phase)) > 35


def test_without_convention_it_is_inferred(write_dataset, tmp_path):
    dataset = open_dataset(write_dataset(tmp_path / "d"))
    assert dataset.meta == {} and dataset.action_convention == ActionConvention(hz=5.0)


def test_same_columns_and_types_as_a_real_dataset(shared, write_dataset, tmp_path):
    official, ours = shared / "data" / "lerobot_v30", write_dataset(tmp_path / "d")
    renamed = {"observation.images.exterior_1": REAL, "observation.images.exterior_2": SIM}

    def columns(root, name, other=False):
        schema = pq.read_schema(root / name)
        found = [(field.name, field.type) for field in schema if not field.name.startswith("stats/")]
        if other:
            found = [(n, t) for n, t in found if "wrist" not in n and "joint_position" not in n]
            for old, new in renamed.items():
                found = [(n.replace(old, new), t) for n, t in found]
        return found

    assert columns(ours, "data/chunk-000/file-000.parquet") == columns(
        official, "data/chunk-000/file-000.parquet", other=True
    )
    assert columns(ours, "meta/tasks.parquet") == columns(official, "meta/tasks.parquet")
    assert sorted(map(str, columns(ours, EPISODES))) == sorted(map(str, columns(official, EPISODES, other=True)))
    info, expected = (json.loads((root / "meta/info.json").read_text()) for root in (ours, official))
    assert list(info) == list(expected)
    for name in (
        "observation.state",
        "action",
        "timestamp",
        "frame_index",
        "episode_index",
        "index",
        "task_index",
    ):
        assert info["features"][name].keys() == expected["features"][name].keys()
        assert info["features"][name]["dtype"] == expected["features"][name]["dtype"]
    assert info["features"][REAL]["info"].keys() == expected["features"]["observation.images.wrist"]["info"].keys()
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"], info["fps"]) == (3, 43, 2, 5)
    assert isinstance(info["fps"], int) and info["splits"] == {"train": "0:3"}


def test_task_text_is_the_pandas_index(write_dataset, tmp_path):
    schema = pq.read_schema(write_dataset(tmp_path / "d") / "meta/tasks.parquet")
    header = json.loads(schema.metadata[b"pandas"])
    assert header["index_columns"] == ["task"]
    assert [column["name"] for column in header["columns"]] == ["task_index", "task"]


def test_statistics(write_dataset, frames, vectors, tmp_path):
    root = write_dataset(tmp_path / "d")
    stats = json.loads((root / "meta/stats.json").read_text())
    state = np.concatenate([vectors(n, k) for k, n in enumerate((20, 9, 14))]).astype(np.float64)
    for name, value in (("min", state.min(0)), ("mean", state.mean(0)), ("std", state.std(0))):
        np.testing.assert_allclose(stats["observation.state"][name], value, rtol=1e-12)
    np.testing.assert_allclose(stats["observation.state"]["q90"], np.quantile(state, 0.9, axis=0))
    assert stats["observation.state"]["count"] == [43] and stats["index"]["max"] == [42]
    pictures = np.concatenate([frames(n, 32, 48, k) for k, n in enumerate((20, 9, 14))]) / 255
    assert np.shape(stats[REAL]["mean"]) == (3, 1, 1) and stats[REAL]["count"] == [43]
    np.testing.assert_allclose(np.ravel(stats[REAL]["mean"]), pictures.mean((0, 1, 2)))
    np.testing.assert_allclose(np.ravel(stats[REAL]["std"]), pictures.std((0, 1, 2)))
    np.testing.assert_allclose(np.ravel(stats[REAL]["q50"]), np.median(pictures, axis=(0, 1, 2)), atol=1 / 255)
    table = pq.read_table(root / EPISODES).to_pylist()
    np.testing.assert_allclose(table[1]["stats/action/max"], vectors(9, 101).max(0))
    np.testing.assert_allclose(np.ravel(table[1][f"stats/{SIM}/min"]), frames(9, 32, 48, 1.5).min((0, 1, 2)) / 255)
    assert table[1]["stats/frame_index/max"] == [8]


def test_files_roll_over_at_their_limits(write_dataset, tmp_path):
    lengths = (20, 9, 14, 6)
    small = open_dataset(write_dataset(tmp_path / "s", lengths, data_file_mb=0.001, video_file_mb=0.005))
    large = open_dataset(write_dataset(tmp_path / "l", lengths))
    assert len(list(small.root.glob("data/*/*.parquet"))) > 1
    assert len(list(small.root.glob(f"videos/{REAL}/*/*.mp4"))) > 1
    assert len(list(large.root.rglob("*.mp4"))) == 2
    for a, b in zip(small, large, strict=True):
        np.testing.assert_array_equal(a.state, b.state)
        assert a.task == b.task and psnr(a.frames(SIM), b.frames(SIM)) > 35


def test_bytes_are_the_same_every_time(write_dataset, tmp_path):
    first, second = files(write_dataset(tmp_path / "a")), files(write_dataset(tmp_path / "b"))
    assert first == second and len(first) == 7


def test_one_dimension_is_a_plain_column(new_writer, frames, tmp_path):
    values = np.arange(6, dtype=np.float32)[:, None]
    pictures = {REAL: frames(6, 32, 48), SIM: frames(6, 32, 48)}
    with new_writer(tmp_path / "d", state_names=["joint"]) as writer:
        writer.add_episode(pictures, values, np.zeros((6, 7), np.float32), "push")
    schema = pq.read_schema(tmp_path / "d/data/chunk-000/file-000.parquet")
    assert schema.field("observation.state").type == pa.float32()
    np.testing.assert_array_equal(open_dataset(tmp_path / "d")[0].state, values)


def test_other_rates_and_sizes(frames, tmp_path):
    key = "observation.images.top"
    names = ["a", "b"]
    arguments = {"robot": "r", "cameras": {key: (64, 32)}, "state_names": names, "action_names": names}
    with LeRobotWriter(tmp_path / "d", fps=12.5, **arguments) as writer:
        for n in (7, 1, 30):
            writer.add_episode({key: frames(n, 64, 32, n)}, np.ones((n, 2)), np.zeros((n, 2), np.float64), "")
    dataset = open_dataset(tmp_path / "d")
    assert dataset.fps == 12.5 and dataset.lengths == (7, 1, 30)
    for episode in dataset:
        assert psnr(episode.frames(key), frames(episode.length, 64, 32, episode.length)) > 35


BAD_EPISODES = {
    "camera missing": (lambda e: e["frames"].pop(SIM), "no frames for camera observation.images.sim"),
    "camera unknown": (lambda e: e["frames"].update(sims=e["frames"][SIM]), "unknown camera 'sims'"),
    "camera size": (
        lambda e: e["frames"].update({SIM: e["frames"][SIM][:, 2:]}),
        r"uint8 \[8, 30, 48, 3\]; give",
    ),
    "camera type": (lambda e: e["frames"].update({SIM: e["frames"][SIM] / 255}), r"float64 \[8, 32, 48, 3\]"),
    "camera length": (lambda e: e["frames"].update({SIM: e["frames"][SIM][1:]}), r"sim 7\); give as many"),
    "empty": (lambda e: e.update(frames={k: v[:0] for k, v in e["frames"].items()}), "no frames in it"),
    "state length": (lambda e: e.update(state=e["state"][1:]), "8 frames but 7 rows of observation.state"),
    "action width": (
        lambda e: e.update(action=e["action"][:, 1:]),
        r"action has shape \[8, 6\]; give \[N, 7\]",
    ),
    "action type": (
        lambda e: e.update(action=e["action"].astype(int)),
        "action has type int64; give float32",
    ),
    "not finite": (
        lambda e: e["state"].__setitem__((3, 2), np.inf),
        "observation.state has values that are not finite",
    ),
    "task": (lambda e: e.update(task=None), "the task is NoneType"),
}


@pytest.mark.parametrize("name", BAD_EPISODES)
def test_bad_episode_is_refused_by_name_and_the_others_stay(new_writer, frames, vectors, tmp_path, name):
    def episode():
        pictures = {REAL: frames(8, 32, 48), SIM: frames(8, 32, 48)}
        return {"frames": pictures, "state": vectors(8, 0), "action": vectors(8, 1), "task": "t"}

    damage, message = BAD_EPISODES[name]
    bad = episode()
    damage(bad)
    with new_writer(tmp_path / "d") as writer:
        writer.add_episode(**episode())
        with pytest.raises(SimForcingError, match=rf"episode 1 of .*{message}"):
            writer.add_episode(**bad)
        writer.add_episode(**episode())
    assert open_dataset(tmp_path / "d").lengths == (8, 8)


BAD_ARGUMENTS = {
    "no cameras": ({"cameras": {}}, "no cameras"),
    "odd size": ({"cameras": {REAL: (31, 48)}}, "needs an even height and width"),
    "slash": ({"cameras": {"a/b": (32, 32)}}, "cannot name a directory"),
    "names": ({"action_names": ["x", "x"]}, "one different name a dimension"),
    "fps": ({"fps": 0}, "give a positive number"),
    "convention": ({"meta": {"action": {"kin": "delta"}}}, "no key 'kin'; did you mean 'kind'"),
    "meta": ({"meta": {"x": np.zeros(2)}}, "cannot be stored as JSON"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_anything_is_written(new_writer, tmp_path, name):
    changes, message = BAD_ARGUMENTS[name]
    with pytest.raises(SimForcingError, match=message):
        new_writer(tmp_path / "d", **changes)
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_never_touched(write_dataset, new_writer, frames, vectors, tmp_path):
    root = write_dataset(tmp_path / "d")
    before = files(root)
    with pytest.raises(SimForcingError, match="already exists and is not overwritten"):
        write_dataset(root)
    writer = new_writer(tmp_path / "late")
    pictures = {REAL: frames(8, 32, 48), SIM: frames(8, 32, 48)}
    writer.add_episode(pictures, vectors(8, 0), vectors(8, 1), "t")
    (tmp_path / "late").mkdir()
    with pytest.raises(SimForcingError, match="appeared while it was being written"):
        writer.close()
    assert files(root) == before and sorted(p.name for p in tmp_path.iterdir()) == ["d", "late"]


def test_failure_leaves_nothing(new_writer, frames, vectors, tmp_path):
    pictures = {REAL: frames(8, 32, 48), SIM: frames(8, 32, 48)}
    with pytest.raises(KeyboardInterrupt), new_writer(tmp_path / "d") as writer:
        writer.add_episode(pictures, vectors(8, 0), vectors(8, 1), "t")
        assert [p.name for p in tmp_path.iterdir()] == [f"d.partial-{os.getpid()}"]
        raise KeyboardInterrupt
    with pytest.raises(SimForcingError, match="no episodes were added"), new_writer(tmp_path / "d"):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SimForcingError, match=r"episode 1 of .*the writer is closed"):
        writer.add_episode(pictures, vectors(8, 0), vectors(8, 1), "t")


KILLED = """
import sys
import numpy as np
from pathlib import Path
from simforcing.data import REAL, LeRobotWriter
with LeRobotWriter(Path(sys.argv[1]), fps=5, robot="r", cameras={REAL: (32, 32)},
                   state_names=["a"], action_names=["a"]) as writer:
    for k in range(100000):
        pictures = {REAL: np.full((9, 32, 32, 3), k % 256, np.uint8)}
        writer.add_episode(pictures, np.ones((9, 1)), np.ones((9, 1)), "t")
        if k == 2:
            print("writing", flush=True)
"""


def test_a_killed_writer_leaves_no_dataset(write_dataset, tmp_path):
    out = tmp_path / "d"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert not out.exists()
    assert [p.name for p in tmp_path.iterdir()] == [f"d.partial-{process.pid}"]
    assert open_dataset(write_dataset(out)).lengths == (20, 9, 14)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
