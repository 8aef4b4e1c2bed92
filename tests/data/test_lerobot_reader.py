"""Reading LeRobot v3.0: a real dataset, and every way in which one can be broken."""

import json
import shutil

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simforcing.data import REAL, SIM, ActionConvention, open_dataset
from simforcing.data.windows import ClipRule, load_clip
from simforcing.errors import SimForcingError

EPISODES = "meta/episodes/chunk-000/file-000.parquet"
DATA = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{SIM}/chunk-000/file-000.mp4"


@pytest.fixture
def real(shared):
    return open_dataset(shared / "data" / "lerobot_v30")


def test_real_dataset_numbers(real, shared):
    assert real.lengths == (33, 72, 89) and real.fps == 5 and real.robot == "franka"
    assert [camera.rsplit(".", 1)[1] for camera in real.cameras] == ["exterior_1", "exterior_2", "wrist"]
    assert real.tasks[0] == "Move the green towel to the right of the lid"
    assert real.action_names == ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
    assert real.action_convention == ActionConvention(rotation="euler_xyz", hz=5.0)
    table = pq.read_table(shared / "data" / "lerobot_v30" / DATA).to_pydict()
    np.testing.assert_array_equal(np.concatenate([e.state for e in real]), np.float32(table["observation.state"]))
    np.testing.assert_array_equal(np.concatenate([e.action for e in real]), np.float32(table["action"]))
    assert real[1].task == real.tasks[1]
    np.testing.assert_allclose(real[2].timestamps, np.arange(89) / 5, atol=1e-5)


@pytest.mark.parametrize("camera", ["exterior_1", "wrist"])
def test_real_windows_equal_a_sequential_decode(real, camera):
    key = f"observation.images.{camera}"
    path = real.root / f"videos/{key}/chunk-000/file-000.mp4"
    with av.open(str(path)) as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    first = 0
    for episode in real:
        for start in (0, 5, episode.length - 13):
            clip = load_clip(episode, start, ClipRule(13, 1, 192, 320), [key])
            np.testing.assert_array_equal(clip.frames[key], every[first + start : first + start + 13])
        first += episode.length
    assert first == len(every) == 194


def test_whole_episode_equals_its_frames(real):
    episode, key = real[0], real.cameras[0]
    np.testing.assert_array_equal(episode.frames(key)[[4, 32]], episode.frames(key, [4, 32]))


def change_json(root, name, change):
    path = root / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_table(root, name, change):
    path = root / name
    pq.write_table(change(pq.read_table(path)), path)


def with_column(column, change):
    """A change of one column of a table, through its values as a list."""

    def apply(table):
        values = table[column].to_pylist()
        change(values)
        return table.set_column(
            table.column_names.index(column), column, pa.array(values, table.schema.field(column).type)
        )

    return apply


def put(index, value):
    return lambda values: values.__setitem__(index, value)


def drop_rows(keep):
    return lambda table: table.take([i for i in range(table.num_rows) if keep(i)])


# name -> (how to break a dataset of episodes with 20, 9 and 14 rows, what the error says)
BROKEN = {
    "no meta": (lambda d: shutil.rmtree(d / "meta"), r"not a LeRobot dataset \(no meta/info\.json\)"),
    "info is not JSON": (
        lambda d: (d / "meta/info.json").write_text("{"),
        r"info\.json: cannot be read as JSON",
    ),
    "no version": (
        lambda d: change_json(d, "meta/info.json", lambda c: c.pop("codebase_version")),
        "no codebase_version",
    ),
    "no features": (
        lambda d: change_json(d, "meta/info.json", lambda c: c.pop("features")),
        "no features; the file",
    ),
    "bad fps": (lambda d: change_json(d, "meta/info.json", lambda c: c.update(fps=0)), "fps is 0"),
    "other fps": (
        lambda d: change_json(d, "meta/info.json", lambda c: c.update(fps=10)),
        "20 rows but 40 frames of observation.images.real by its timestamps",
    ),
    "no action": (
        lambda d: change_json(d, "meta/info.json", lambda c: c["features"].pop("action")),
        "no feature 'action'",
    ),
    "no camera": (
        lambda d: change_json(d, "meta/info.json", lambda c: [c["features"].pop(k) for k in (REAL, SIM)]),
        "no camera of dtype 'video'",
    ),
    "path template": (
        lambda d: change_json(d, "meta/info.json", lambda c: c.update(video_path="videos/{nothing}.mp4")),
        "video_path 'videos/{nothing}.mp4' is not a v3.0 path",
    ),
    "episode count": (
        lambda d: change_json(d, "meta/info.json", lambda c: c.update(total_episodes=4)),
        "says 4 episodes, meta/episodes lists 3",
    ),
    "convention": (
        lambda d: (d / "meta/simforcing.json").write_text('{"action": {"kind": "jump"}}'),
        r"simforcing\.json: action convention: kind is 'jump'",
    ),
    "no episodes": (lambda d: (d / EPISODES).unlink(), r"meta/episodes: no chunk-\*/file-\*\.parquet"),
    "no tasks": (lambda d: (d / "meta/tasks.parquet").unlink(), r"tasks\.parquet: file is missing"),
    "tasks column": (
        lambda d: change_table(d, "meta/tasks.parquet", lambda t: t.drop_columns(["task"])),
        "needs columns task_index and task",
    ),
    "episode column": (
        lambda d: change_table(d, EPISODES, lambda t: t.drop_columns([f"videos/{SIM}/from_timestamp"])),
        r"no column 'videos/observation\.images\.sim/from_timestamp'",
    ),
    "episode column null": (
        lambda d: change_table(d, EPISODES, with_column("length", put(1, None))),
        "column 'length' has missing values",
    ),
    "episode number": (
        lambda d: change_table(d, EPISODES, with_column("episode_index", put(2, 7))),
        "episode 2 of .* has number 7 there",
    ),
    "index range": (
        lambda d: change_table(d, EPISODES, with_column("dataset_to_index", put(0, 19))),
        "episode 0 of .*: length 20 but rows 0 to 19",
    ),
    "video seconds": (
        lambda d: change_table(d, EPISODES, with_column(f"videos/{SIM}/to_timestamp", put(1, 6.0))),
        "episode 1 of .*: 9 rows but 10 frames of observation.images.sim",
    ),
    "double column": (
        lambda d: change_table(d, EPISODES, lambda t: t.append_column("length", t["length"])),
        "column 'length' is there twice",
    ),
    "parquet gone": (lambda d: (d / DATA).unlink(), r"file-000\.parquet: data file is missing"),
    "parquet cut": (
        lambda d: (d / DATA).write_bytes((d / DATA).read_bytes()[:500]),
        r"file-000\.parquet: cannot be read as parquet",
    ),
    "video gone": (lambda d: (d / VIDEO).unlink(), r"file-000\.mp4: video file is missing"),
    "video empty": (lambda d: (d / VIDEO).write_bytes(b""), r"file-000\.mp4: video file has zero bytes"),
    "video pointer": (
        lambda d: (d / VIDEO).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        r"file-000\.mp4: only a pointer",
    ),
    "video cut": (
        lambda d: (d / VIDEO).write_bytes((d / VIDEO).read_bytes()[: (d / VIDEO).stat().st_size // 2]),
        r"sim/chunk-000/file-000\.mp4: ",
    ),
    "rows missing": (
        lambda d: change_table(d, DATA, drop_rows(lambda i: i != 25)),
        r"episode 1 of .*: length 9 but 8 rows in",
    ),
    "no rows": (
        lambda d: change_table(d, DATA, drop_rows(lambda i: not 20 <= i < 29)),
        "episode 1 of .*: no rows in",
    ),
    "row order": (
        lambda d: change_table(d, DATA, lambda t: t.take([*range(30, 43), *range(30)])),
        "rows of episode 2 are not together",
    ),
    "frame index": (
        lambda d: change_table(d, DATA, with_column("frame_index", put(24, 9))),
        "episode 1 of .*: frame_index does not count 0 to 8",
    ),
    "timestamps": (
        lambda d: change_table(d, DATA, with_column("timestamp", put(24, 3.0))),
        "episode 1 of .*: timestamp of row 4 does not fit 5 rows a second",
    ),
    "task index": (
        lambda d: change_table(d, DATA, with_column("task_index", put(24, 5))),
        r"episode 1 of .*: task index 5 is not in .*tasks\.parquet \(2 tasks\)",
    ),
    "not finite": (
        lambda d: change_table(d, DATA, with_column("action", put(24, [0, 0, 0, 0, 0, 0, float("nan")]))),
        "episode 1 of .*: action has values that are missing or not finite",
    ),
    "no state": (
        lambda d: change_table(d, DATA, with_column("observation.state", put(24, None))),
        r"column observation\.state has 1 rows without a value",
    ),
    "state width": (
        lambda d: change_table(
            d,
            DATA,
            lambda t: t.set_column(0, "observation.state", pa.array([[0.0] * (2 + (i == 3)) for i in range(43)])),
        ),
        r"rows of observation\.state differ in width",
    ),
    "index column null": (
        lambda d: change_table(d, DATA, with_column("timestamp", put(3, None))),
        "column timestamp has 1 missing values",
    ),
    "data column": (
        lambda d: change_table(d, DATA, lambda t: t.drop_columns(["action"])),
        r"no column 'action' \(there are: observation\.state",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_dataset_says_what_and_where(dataset_path, tmp_path, name):
    root = shutil.copytree(dataset_path, tmp_path / "d")
    damage, message = BROKEN[name]
    damage(root)
    with pytest.raises(SimForcingError, match=message) as caught:
        for episode in open_dataset(root):
            for key in (REAL, SIM):
                episode.frames(key)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_the_undamaged_dataset_opens(dataset_path):
    for episode in open_dataset(dataset_path):
        assert len(episode.frames(REAL)) == len(episode.frames(SIM)) == episode.length


def test_variable_length_lists_and_named_groups_are_read(dataset_path, tmp_path):
    root = shutil.copytree(dataset_path, tmp_path / "d")
    before = open_dataset(root)[1].state
    kind = pa.list_(pa.float64())
    change_table(root, DATA, lambda t: t.set_column(0, "observation.state", t["observation.state"].cast(kind)))
    change_json(
        root,
        "meta/info.json",
        lambda c: c["features"]["action"].update(names={"pose": ["a", "roll", "pitch", "yaw"], "hand": ["g"]}),
    )
    dataset = open_dataset(root)
    np.testing.assert_array_equal(dataset[1].state, before)
    assert dataset.action_names == ("a", "roll", "pitch", "yaw", "g")
    assert dataset.action_convention.rotation == "euler_xyz"


def test_other_places_and_versions(shared, tmp_path):
    data = shared / "data"
    with pytest.raises(SimForcingError, match=r"2 videos \(bridge_real_1\.mp4 \.\.\.\) without actions or states"):
        open_dataset(data / "odd" / "bridge_real_640x480")
    with pytest.raises(SimForcingError, match=r"nor another known one; did you mean .*data/bridge"):
        open_dataset(data)
    (tmp_path / "old" / "meta").mkdir(parents=True)
    (tmp_path / "old/meta/info.json").write_text('{"codebase_version": "v1.6"}')
    with pytest.raises(
        SimForcingError, match=r"LeRobot v1\.6 is not readable by this version, only v3\.0, v2\.1, v2\.0"
    ):
        open_dataset(tmp_path / "old")
    with pytest.raises(SimForcingError, match="no such directory"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(SimForcingError, match="is a file"):
        open_dataset(data / "README.md")


def test_real_malformed_datasets(shared, tmp_path):
    odd = shared / "data" / "odd" / "omx_malformed_v3"
    with pytest.raises(SimForcingError, match=r"data/train/episode_000000\.parquet: data file is missing"):
        open_dataset(odd / "franka_pickplace")
    with pytest.raises(SimForcingError, match=r"dataset/meta/info\.json: no codebase_version"):
        open_dataset(odd / "dataset")
    copy = tmp_path / "copy"
    for source in (odd / "franka_pickplace" / "meta").rglob("*"):
        if source.is_file():
            target = copy / "meta" / source.relative_to(odd / "franka_pickplace" / "meta")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    shutil.copyfile(odd / "franka_pickplace/meta/episodes/episodes.parquet", copy / EPISODES)
    with pytest.raises(SimForcingError, match=r"column 'videos/observation\.images\.top/chunk_index' is there twice"):
        open_dataset(copy)
