"""Audit: every shared dataset with what its README says of it, and every kind of finding on purpose."""

import functools
import json
import re
import shutil

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simforcing.data import REAL, SIM, open_dataset
from simforcing.data.audit import CLIP_RULES, audit, open_checked
from simforcing.data.audit_lag import estimate
from simforcing.data.audit_rows import wraps
from simforcing.errors import SimForcingError

DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
VIDEO = f"videos/{SIM}/chunk-000/file-000.mp4"
V2_DATA = "data/chunk-000/episode_000001.parquet"
V2_VIDEO = f"videos/chunk-000/{SIM}/episode_000001.mp4"


def found(result, kind):
    return [finding for finding in result.findings if finding.kind == kind]


def episodes(result, kind):
    return [finding.episode for finding in found(result, kind)]


# --- the shared datasets, as their README describes them


@pytest.fixture(scope="module")
def audited(shared):
    """Audit of a shared dataset, made once."""
    return functools.cache(lambda name: audit(shared / "data" / name))


@pytest.mark.parametrize("name", ["lerobot_v21", "lerobot_v30"])
def test_real_lerobot(audited, name):
    result = audited(name)
    assert not result.kinds("error") and len(result.lengths) == 3 and result.lengths == [33, 72, 89]
    assert result.fps == 5 and abs(result.fps_measured - 5) < 1e-3
    assert set(episodes(result, "angle_wrap")) == {0, 1, 2}
    assert all("roll" in finding.message for finding in found(result, "angle_wrap"))
    assert episodes(result, "constant_dimension") == [0, 0]
    assert result.windows["bridge"] == {"windows": 13 + 52 + 69, "episodes": 3}
    assert result.windows["interndata_a1"] == {"windows": 0, "episodes": 0}
    assert 0.5 < result.lag["observation.images.wrist"].frames < 2 and result.exit_code == 1
    assert result.pictures["observation.images.wrist"] == {"height": 192, "width": 320, "codec": "h264"}


def test_real_droid(audited):
    result = audited("droid")
    assert not result.kinds("error") and len(result.lengths) == 8
    assert [finding.file.stem for finding in found(result, "empty_instruction")] == ["0", "4", "6"]
    still = {finding.file.stem for finding in found(result, "constant_dimension") if "gripper" in finding.message}
    assert still == {"6", "199"}
    assert {finding.file.stem for finding in found(result, "angle_wrap")} >= {"1", "3", "199"}
    assert 0.8 < result.lag["state"].frames < 1.6  # README: 0.27 s, which is 1.35 frames
    assert all(0.8 < lag.frames < 1.8 for lag in result.lag.values())


def test_real_bridge(audited):
    result = audited("bridge")
    assert not result.kinds("error") and result.fps == 5 and result.fps_measured == 20
    assert episodes(result, "container_fps") == episodes(result, "empty_instruction") == list(range(7))
    clipped = [
        re.search(r"action (\w+) .* ([-.0-9]+) \(", finding.message).groups() for finding in found(result, "clipped")
    ]
    assert [name for name, _ in clipped] == ["y", "z", "yaw"]
    assert {round(abs(float(value)) * (5.6 if name == "yaw" else 35), 2) for name, value in clipped} == {1.74, 1.39}
    assert 1.0 <= result.lag[REAL].frames <= 2.0 and found(result, "image_lag")


def test_real_rlds(audited):
    result = audited("bridge_rlds")
    assert not result.kinds("error") and result.windows["bridge"]["windows"] == 0 == result.windows["demo"]["windows"]
    black = found(result, "black_camera")
    assert len(black) == 25 and all("image_3" in finding.message for finding in black)
    assert episodes(result, "contradicting_metadata") == list(range(25))
    assert "has_image_0 is 0" in found(result, "contradicting_metadata")[0].message
    assert "'val'" in found(result, "missing_split")[0].message


def test_odd_lerobot_without_files(shared):
    root = shared / "data/odd/lerobot_g1_v21"
    result = audit(root)
    tables = episodes(result, "missing_table")
    assert len(tables) == 98 and not {0, 29} & set(tables) and len(episodes(result, "missing_video")) == 99
    assert result.pictures["observation.images.cam_high"]["codec"] == "av1"
    assert result.windows["interndata_a1"] == {"windows": 93, "episodes": 1}  # of episode 29, 221 rows
    kept = open_checked(root, skip_bad=True, video=False)
    assert kept.lengths == (221,) and len(kept.skipped) == 99 and "episode 29 of" in kept[0].where
    assert all(str(root) in reason for _, reason in kept.skipped)
    with pytest.raises(SimForcingError, match=r"episode_000001\.parquet: .*missing.*\(\d+ errors in all"):
        open_checked(root, video=False)


def test_odd_droid(audited, shared):
    result = audited("odd/droid_no_actions")
    assert episodes(result, "no_action") == [0, 1, 2] and episodes(result, "length_mismatch") == [0, 0, 0]
    assert "41 rows but 42 frames" in found(result, "length_mismatch")[0].message
    assert len(found(result, "container_fps")) == 9 and result.fps_measured == 4
    with pytest.raises(SimForcingError, match="all 3 episodes have errors"):
        open_checked(shared / "data/odd/droid_no_actions", skip_bad=True, video=False)


def test_odd_malformed_v3(audited):
    result = audited("odd/omx_malformed_v3/franka_pickplace")
    assert episodes(result, "missing_table") == list(range(10))
    assert len(found(result, "duplicate_column")) == 4
    said = " ".join(finding.message for finding in found(result, "contradicting_metadata"))
    assert "codec" in said and "shares frames" in said


@pytest.mark.parametrize("name", ["bridge_real_640x480", "omx_malformed_v3/dataset", "omx_malformed_v3", "."])
def test_odd_unreadable(shared, name):
    with pytest.raises(SimForcingError):
        audit(shared / "data" / "odd" / name)


# --- each kind, made on purpose


@pytest.fixture(scope="module")
def sound(tmp_path_factory, frames, new_writer):
    """A dataset without a finding: a robot that moves smoothly before cameras that show it."""
    root = tmp_path_factory.mktemp("sound") / "d"
    with new_writer(root) as writer:
        for k, length in enumerate((20, 9, 14)):
            steps = np.arange(length)[:, None]
            state = np.sin(0.1 * steps + np.arange(7) + k).astype(np.float32) * 0.5
            pictures = {REAL: frames(length, 32, 48, k), SIM: frames(length, 32, 48, k + 0.5)}
            writer.add_episode(pictures, state, state + 0.01 * np.cos(steps).astype(np.float32), f"task {k % 2}")
    return root


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "d")


def test_a_sound_dataset_is_clean(sound):
    result = audit(sound)
    assert (result.findings, result.exit_code) == ([], 0)
    assert result.windows["demo"] == {"windows": 10, "episodes": 2} and set(CLIP_RULES) == set(result.windows)
    assert open_checked(sound).skipped == ()


def change_rows(root, column, change, name=DATA):
    table = pq.read_table(root / name)
    values = table[column].to_pylist()
    change(values)
    place, kind = table.column_names.index(column), table.schema.field(column).type
    pq.write_table(table.set_column(place, column, pa.array(values, kind)), root / name)


def change_info(root, change, name="meta/info.json"):
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


def put(row, column, value):
    def apply(values):
        values[row] = value if column is None else [*values[row][:column], value, *values[row][column + 1 :]]

    return apply


def set_all(column, make):
    def apply(values):
        for i, row in enumerate(values):
            values[i] = [*row[:column], make(i, row[column]), *row[column + 1 :]]

    return apply


def wrap(row, roll):
    return float((roll + 8 * np.sin(0.6 * row) + np.pi) % (2 * np.pi) - np.pi)


def rename_roll(root):
    change_info(root, lambda c: c["features"]["observation.state"].update(names=[*"xyz", "roll", "pitch", "yaw", "g"]))
    change_rows(root, "observation.state", set_all(3, wrap))


def duplicate(root, info):
    for name in ("observation.state", "action"):
        change_rows(root, name, lambda values: values.__setitem__(slice(29, 38), values[20:29]))
    change_rows(root, "episode_index", lambda values: values.__setitem__(slice(38, 43), [3] * 5))
    change_rows(root, "frame_index", lambda values: values.__setitem__(slice(38, 43), list(range(5))))
    change_info(root, info)


# kind -> (how a dataset of 20, 9 and 14 rows gets it, severity, episode, part of the message)
MADE = {
    "duplicate_column": (
        lambda d: pq.write_table((t := pq.read_table(d / EPISODES)).append_column("length", t["length"]), d / EPISODES),
        "error",
        None,
        "'length' is there twice",
    ),
    "missing_column": (
        lambda d: pq.write_table(pq.read_table(d / DATA).drop_columns(["action"]), d / DATA),
        "error",
        None,
        "no column 'action'",
    ),
    "unreadable_table": (lambda d: (d / DATA).write_bytes(b"PAR1"), "error", 0, "cannot be read as parquet"),
    "missing_table": (lambda d: (d / DATA).unlink(), "error", 0, "data file is missing"),
    "missing_video": (lambda d: (d / VIDEO).unlink(), "error", 0, "video file is missing"),
    "empty_video": (lambda d: (d / VIDEO).write_bytes(b""), "error", 0, "zero bytes"),
    "pointer_video": (
        lambda d: (d / VIDEO).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0"),
        "error",
        0,
        "only a pointer",
    ),
    "undecodable_video": (lambda d: (d / VIDEO).write_bytes(bytes(3000)), "error", 0, "cannot be opened"),
    "truncated_video": (
        lambda d: (d / VIDEO).write_bytes((d / VIDEO).read_bytes()[: (d / VIDEO).stat().st_size * 6 // 10]),
        "error",
        2,
        "of 14 frames of observation.images.sim can be decoded",
    ),
    "not_finite": (
        lambda d: change_rows(d, "action", put(24, 3, float("inf"))),
        "error",
        1,
        "missing or not finite (row 4",
    ),
    "missing_rows": (
        lambda d: change_rows(d, "frame_index", put(24, None, 9)),
        "error",
        1,
        "frame_index does not count",
    ),
    "timestamps": (lambda d: change_rows(d, "timestamp", put(24, None, 3.0)), "error", 1, "does not fit 5 rows"),
    "timestamp_jitter": (
        lambda d: change_rows(d, "timestamp", put(24, None, 0.85)),
        "warning",
        1,
        "stray by up to 0.25 frames",
    ),
    "timestamp_repeat": (lambda d: change_rows(d, "timestamp", put(5, None, 0.8)), "warning", 0, "repeat at rows 5"),
    "constant_dimension": (
        lambda d: change_rows(d, "action", set_all(5, lambda i, v: 0.5)),
        "warning",
        None,
        "action rz never changes",
    ),
    "clipped": (
        lambda d: change_rows(d, "action", set_all(0, lambda i, v: float(np.clip(np.sin(i), -0.9, 0.9)))),
        "warning",
        None,
        "action x is cut off at -0.9",
    ),
    "angle_wrap": (rename_roll, "warning", 0, "state roll wraps by a full turn"),
    "empty_instruction": (
        lambda d: change_rows(d, "tasks", put(1, None, [""]), EPISODES),
        "warning",
        1,
        "instruction is empty",
    ),
    "split_overlap": (
        lambda d: change_info(d, lambda c: c.update(splits={"train": "0:3", "val": "2:3"})),
        "error",
        2,
        "is both in split 'train' and in 'val'",
    ),
    "contradicting_metadata": (
        lambda d: change_info(d, lambda c: c.update(total_frames=44)),
        "warning",
        None,
        "total_frames is 44, found 43",
    ),
    "stray_file": (
        lambda d: shutil.copy(d / DATA, d / "data/more.parquet"),
        "warning",
        None,
        "no metadata name this file",
    ),
    "length_mismatch": (
        lambda d: change_rows(d, "length", put(1, None, 8), EPISODES),
        "error",
        1,
        "length 8 but 9 rows",
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_each_kind_is_found(copy, kind):
    damage, severity, episode, message = MADE[kind]
    damage(copy)
    result = audit(copy)
    hits = [f for f in found(result, kind) if message in f.message]
    assert hits, [(f.kind, f.message) for f in result.findings]
    assert (hits[0].severity, hits[0].episode) == (severity, episode)
    assert result.exit_code == 1 and "\n" not in hits[0].message
    if severity == "error":
        with pytest.raises(SimForcingError):
            open_checked(copy)


# what in meta/ can contradict the data -> part of the message
CONTRADICTIONS = {
    "statistics": (
        lambda d: change_info(d, lambda c: c["action"].update(max=[9.0] * 7), "meta/stats.json"),
        "max of action",
    ),
    "shape": (lambda d: change_info(d, lambda c: c["features"][SIM].update(shape=[64, 48, 3])), "its videos are 32x48"),
    "codec": (
        lambda d: change_info(d, lambda c: c["features"][SIM]["info"].update({"video.codec": "av1"})),
        "is av1, its videos are h264",
    ),
    "rate": (
        lambda d: change_info(d, lambda c: c["features"][SIM]["info"].update({"video.fps": 30.0})),
        "fps is 5 but video.fps",
    ),
    "names": (
        lambda d: change_info(d, lambda c: c["features"]["action"].update(names=["a", "b"])),
        "action has 7 numbers a row but 2 names",
    ),
    "split": (lambda d: change_info(d, lambda c: c.update(splits={"train": "0:9"})), "is 0:9 but there are 3 episodes"),
    "width": (
        lambda d: change_info(d, lambda c: c["features"]["action"].update(shape=[6])),
        "action has 7 numbers a row, meta/info.json says",
    ),
    "task": (lambda d: change_rows(d, "tasks", put(0, None, ["other"]), EPISODES), "its rows say 'task 0'"),
    "shared frames": (
        lambda d: (
            change_rows(d, f"videos/{SIM}/from_timestamp", put(1, None, 3.0), EPISODES)
            or change_rows(d, f"videos/{SIM}/to_timestamp", put(1, None, 4.8), EPISODES)
        ),
        "shares frames of",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_each_contradiction_is_found(copy, name):
    damage, message = CONTRADICTIONS[name]
    damage(copy)
    assert any(message in finding.message for finding in audit(copy).findings)


def test_the_same_episode_in_train_and_validation(new_writer, frames, tmp_path):
    root = tmp_path / "d"
    with new_writer(root, cameras={REAL: (32, 48)}) as writer:
        for k in (0, 1, 0):
            rows = np.random.default_rng(k).normal(size=(10, 7)).astype(np.float32)
            writer.add_episode({REAL: frames(10, 32, 48, k)}, rows, rows, "x")
    assert episodes(audit(root), "duplicate_episode") == [2]
    change_info(root, lambda c: c.update(splits={"train": "0:2", "val": "2:3"}))
    result = audit(root)
    assert episodes(result, "split_overlap") == [2] and not episodes(result, "duplicate_episode")
    assert (
        "split 'val', has the same numbers as episode 0 in split 'train'" in found(result, "split_overlap")[0].message
    )
    assert len(open_checked(root, skip_bad=True)) == 2


def write_views(new_writer, root, real, sim):
    state = np.sin(0.3 * np.arange(len(real))[:, None] + np.arange(7)).astype(np.float32)
    with new_writer(root) as writer:
        writer.add_episode({REAL: real, SIM: sim}, state, state + 0.01, "x")
    return audit(root)


def test_black_and_frozen_cameras(new_writer, frames, tmp_path):
    good = frames(30, 32, 48)
    result = write_views(new_writer, tmp_path / "a", good * 0, np.repeat(good[:1], 30, axis=0))
    assert [f.message.split("camera ")[1].split(" in ")[0] for f in found(result, "black_camera")] == [
        f"{REAL} is black"
    ]
    assert "frozen" in found(result, "frozen_camera")[0].message and SIM in found(result, "frozen_camera")[0].message
    stuck = good.copy()
    stuck[10:20] = stuck[10]
    dark = good.copy()
    dark[5:12] = 0
    result = write_views(new_writer, tmp_path / "b", stuck, dark)
    assert "repeats one picture for" in found(result, "frozen_camera")[0].message
    assert "is black in 7 of 30 frames" in found(result, "black_camera")[0].message
    plain = np.full_like(good, 180)
    assert "of one colour" in found(write_views(new_writer, tmp_path / "c", good, plain), "black_camera")[0].message


def test_one_file_an_episode(as_v2):
    for name, kind in ((V2_VIDEO, "missing_video"), (V2_DATA, "missing_table")):
        (as_v2 / name).unlink()
        assert episodes(audit(as_v2), kind) == [1]
    kept = open_checked(as_v2, skip_bad=True)
    assert kept.lengths == (20, 14) and [number for number, _ in kept.skipped] == [1]
    assert [episode.index for episode in kept] == [0, 1] and len(kept[1].frames(SIM)) == 14


def test_frames_more_or_fewer_than_rows(as_v2, write_video, frames):
    for count in (8, 10):
        write_video(as_v2 / V2_VIDEO, frames(count, 32, 48))
        assert f"9 rows but {count} frames of {SIM}" in found(audit(as_v2), "length_mismatch")[0].message


def test_a_file_cut_in_the_middle(as_v2):
    path = as_v2 / V2_VIDEO
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert set(episodes(audit(as_v2), "undecodable_video")) | set(episodes(audit(as_v2), "truncated_video")) == {1}
    quick = audit(as_v2, video=False)
    assert not quick.pictures and quick.lag == {}


def test_a_damaged_frame(as_v2):
    path = as_v2 / V2_VIDEO
    with av.open(str(path)) as container:
        packet = next(p for p in container.demux(video=0) if p.pts and p.pts > 3000)
    data = bytearray(path.read_bytes())
    data[packet.pos : packet.pos + 4] = b"\x00\xff\xff\xff"  # the length of what follows
    path.write_bytes(data)
    result = audit(as_v2)
    assert set(episodes(result, "truncated_video")) == {1} and found(result, "truncated_video")[0].file == path


@pytest.mark.parametrize(("fps", "severity"), [(10.0, "error"), (5.05, None)])
def test_rate_of_the_container(as_v2, write_video, frames, fps, severity):
    write_video(as_v2 / V2_VIDEO, frames(9, 32, 48), fps)
    hits = found(audit(as_v2), "container_fps")
    assert [(f.severity, f.episode) for f in hits] == ([(severity, 1)] if severity else [])


def test_uneven_frames(as_v2):
    source, out = as_v2 / V2_VIDEO, as_v2 / "uneven.mp4"
    with av.open(str(source)) as there, av.open(str(out), "w") as here:
        stream = there.streams.video[0]
        copied = here.add_stream_from_template(stream)
        for packet in there.demux(stream):
            if packet.size:
                late = int(0.12 / stream.time_base) if packet.pts > 0 and packet.pts * stream.time_base > 0.9 else 0
                packet.pts, packet.dts, packet.stream = packet.pts + late, packet.pts + late, copied
                here.mux(packet)
    out.replace(source)
    result = audit(as_v2)
    assert episodes(result, "timestamp_jitter") == [1] and episodes(result, "timestamps") == [1]


def test_other_formats_and_their_damage(write_rlds, write_paired, tmp_path):
    clean = audit(write_rlds(tmp_path / "r", (12, 15)))
    assert not clean.kinds("error") and clean.format == "RLDS (tfrecord)"
    root = tmp_path / "r"
    path = next(root.glob("*.tfrecord*"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    broken = audit(root)
    assert episodes(broken, "unreadable_table") == [1] and "checksum" in found(broken, "unreadable_table")[0].message
    path.write_bytes(bytes(data[:-50]))
    assert episodes(audit(root), "unreadable_table") == [1]
    kept = open_checked(root, skip_bad=True)
    assert kept.lengths == (12,) and [number for number, _ in kept.skipped] == [1]
    write_rlds(root, (6,), split="val")
    write_rlds(root, (6,), split="train")
    assert episodes(audit(root), "split_overlap") == [1]
    longer = audit(write_paired(tmp_path / "p", video=15))
    assert longer.kinds("error") == {} and episodes(longer, "length_mismatch") == [0, 1]
    assert longer.cameras == (REAL, SIM) and longer.lengths == [12, 9]


def test_json_form(sound, copy):
    change_rows(copy, "action", put(24, 3, float("nan")))
    stored = json.loads(json.dumps(audit(copy).to_dict()))
    assert stored["exit_code"] == 1 and stored["episodes"] == 3 and stored["frames"] == 43
    (finding,) = [f for f in stored["findings"] if f["kind"] == "not_finite"]
    assert (finding["severity"], finding["episode"], finding["file"]) == ("error", 1, DATA)


def test_errors_of_the_whole_dataset_are_not_skipped(copy):
    change_info(copy, lambda c: c.update(total_episodes=4))
    with pytest.raises(SimForcingError, match="says 4 episodes"):
        open_checked(copy, skip_bad=True)


# --- parts


def test_lag_is_recovered():
    random = np.random.default_rng(0)
    pairs = []
    for _ in range(6):
        told = np.convolve(np.abs(random.normal(size=60)), np.ones(2) / 2, "same")
        pairs.append((told, np.roll(told, 2) + 0.2 * random.normal(size=60)))
    lag = estimate(pairs)
    assert abs(lag.frames - 2) < 0.2 and lag.correlation > 0.8 and lag.transitions == 360
    assert abs(estimate([(b, a) for a, b in pairs]).frames + 2) < 0.2
    noise = [(random.normal(size=60), random.normal(size=60)) for _ in range(6)]
    assert estimate(noise) is None and estimate(pairs[:0]) is None


def test_wraps_of_angles_and_of_others():
    values = np.array([[3.1, 3.0, 0.0], [-3.1, 2.0, 4.0], [-3.0, -1.2, 0.0]])
    assert wraps(values, [True, True, False]) == {0: [1], 1: [2]}
    assert wraps(values, [False] * 3) == {0: [1]}


def test_strict_reading_refuses_what_the_audit_calls_an_error(copy):
    change_rows(copy, "action", put(24, 3, float("nan")))
    data = open_dataset(copy)
    assert data[0].length == 20
    with pytest.raises(SimForcingError, match=r"episode 1 of .*not finite"):
        data[1]
