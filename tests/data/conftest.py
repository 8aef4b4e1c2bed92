"""Small synthetic datasets: smooth pictures, so that lossy video keeps them well above the tested bound."""

import io
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from PIL import Image

from simforcing.data import REAL, SIM, LeRobotWriter, open_dataset
from simforcing.data.tfrecord import masked_crc
from simforcing.data.video import VideoWriter

settings.register_profile("simforcing", deadline=None)  # a busy machine is no failure
settings.load_profile("simforcing")

NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")


def smooth_frames(count: int, height: int, width: int, phase: float = 0.0) -> np.ndarray:
    """uint8 [count, height, width, 3] of slowly moving gradients."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    frames = [
        np.stack(
            [
                127 + 90 * np.sin(3 * x + 0.2 * i + phase),
                127 + 80 * np.cos(2 * y - 0.15 * i + phase),
                40 + 150 * x * y + 2 * (i % 20),
            ],
            axis=-1,
        )
        for i in range(count)
    ]
    return np.array(frames).astype(np.uint8)


def rows(count: int, seed: int) -> np.ndarray:
    """float32 [count, 7] of random numbers."""
    return np.random.default_rng(seed).normal(size=(count, len(NAMES))).astype(np.float32)


@pytest.fixture(scope="session")
def frames() -> Callable[..., np.ndarray]:
    return smooth_frames


@pytest.fixture(scope="session")
def vectors() -> Callable[[int, int], np.ndarray]:
    return rows


def make_writer(out: Path, **changes: object) -> LeRobotWriter:
    arguments: dict[str, object] = {
        "fps": 5.0,
        "robot": "widowx250s",
        "cameras": {REAL: (32, 48), SIM: (32, 48)},
        "state_names": NAMES,
        "action_names": NAMES,
    }
    return LeRobotWriter(out, **(arguments | changes))  # type: ignore[arg-type]


def make_dataset(out: Path, lengths: Sequence[int] = (20, 9, 14), **changes: object) -> Path:
    with make_writer(out, **changes) as writer:
        for k, length in enumerate(lengths):
            pictures = {REAL: smooth_frames(length, 32, 48, k), SIM: smooth_frames(length, 32, 48, k + 0.5)}
            writer.add_episode(pictures, rows(length, k), rows(length, 100 + k), f"task {k % 2}")
    return out


@pytest.fixture(scope="session")
def new_writer() -> Callable[..., LeRobotWriter]:
    """Makes a writer of paired 32x48 pictures at 5 Hz; keywords replace its arguments."""
    return make_writer


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., Path]:
    """Writes a dataset of episodes of the given lengths; episode k has task `task k % 2`."""
    return make_dataset


@pytest.fixture(scope="session")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dataset of 20, 9 and 14 frames that all tests read and none changes."""
    return make_dataset(tmp_path_factory.mktemp("dataset") / "d")


def rewrite_as_v2(source: Path, out: Path) -> Path:
    """The dataset `source` (v3.0) as LeRobot v2.1: one parquet and one video an episode."""
    data = open_dataset(source)
    info = json.loads((source / "meta/info.json").read_text())
    tasks = sorted(set(data.tasks))
    for folder in ("meta", "data/chunk-000", *(f"videos/chunk-000/{key}" for key in data.cameras)):
        (out / folder).mkdir(parents=True)
    lines: dict[str, list[dict[str, object]]] = {"episodes": [], "tasks": []}
    lines["tasks"] = [{"task_index": i, "task": task} for i, task in enumerate(tasks)]
    for episode in data:
        count = episode.length
        table = {
            "observation.state": episode.state.tolist(),
            "action": episode.action.tolist(),
            "timestamp": pa.array(episode.timestamps, pa.float32()),
            "frame_index": np.arange(count),
            "episode_index": np.full(count, episode.index),
            "task_index": np.full(count, tasks.index(episode.task)),
        }
        pq.write_table(pa.table(table), out / f"data/chunk-000/episode_{episode.index:06d}.parquet")
        lines["episodes"].append({"episode_index": episode.index, "tasks": [episode.task], "length": count})
        for key in data.cameras:
            path = out / f"videos/chunk-000/{key}/episode_{episode.index:06d}.mp4"
            _copy_video(
                source / f"videos/{key}/chunk-000/file-000.mp4", path, sum(data.lengths[: episode.index]), count
            )
    for name, rows_of in lines.items():
        (out / f"meta/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    info |= {
        "codebase_version": "v2.1",
        "total_videos": len(data) * len(data.cameras),
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (out / "meta/info.json").write_text(json.dumps(info))
    return out


def _copy_video(source: Path, out: Path, first: int, count: int) -> None:
    """Some frames of a video, without encoding them anew; the first of them is a keyframe."""
    with av.open(str(source)) as there, av.open(str(out), "w") as here:
        stream = there.streams.video[0]
        copy = here.add_stream_from_template(stream)
        packets = [packet for packet in there.demux(stream) if packet.size][first : first + count]
        start = packets[0].pts
        for packet in packets:
            packet.pts, packet.dts, packet.stream = packet.pts - start, packet.pts - start, copy
            here.mux(packet)


@pytest.fixture
def as_v2(dataset_path: Path, tmp_path: Path) -> Path:
    """A LeRobot v2.1 copy of the dataset at `dataset_path`, to be broken."""
    return rewrite_as_v2(dataset_path, tmp_path / "v2")


def varint(number: int) -> bytes:
    out = bytearray()
    number &= 0xFFFFFFFFFFFFFFFF
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def block(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: dict[str, list | np.ndarray], packed: bool = True) -> bytes:
    """Serialised tf.train.Example."""
    entries = b""
    for name, values in features.items():
        if isinstance(values, list):
            feature = block(1, b"".join(block(1, value) for value in values))
        elif values.dtype.kind == "f":
            raw = values.astype("<f4").tobytes()
            one = b"".join(varint(1 << 3 | 5) + raw[i : i + 4] for i in range(0, len(raw), 4))
            feature = block(2, block(1, raw) if packed else one)
        else:
            numbers = [varint(int(value)) for value in values]
            feature = block(3, block(1, b"".join(numbers)) if packed else b"".join(varint(8) + n for n in numbers))
        entries += block(1, block(1, name.encode()) + block(2, feature))
    return block(1, entries)


def record(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    return size + struct.pack("<I", masked_crc(size)) + data + struct.pack("<I", masked_crc(data))


@pytest.fixture(scope="session")
def tfrecord() -> SimpleNamespace:
    """`example(features, packed=True)` serialises a tf.train.Example, `record(data)` frames it for a TFRecord."""
    return SimpleNamespace(example=example, record=record)


def picture(seed: int, black: bool = False) -> bytes:
    """An encoded 64x96 picture."""
    noise = np.random.default_rng(seed).integers(0, 1 if black else 255, (8, 12, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((96, 64)).save(out, "PNG")
    return out.getvalue()


def make_rlds(folder: Path, steps: Sequence[int] = (5, 7), split: str = "train", **changes: object) -> Path:
    """A tfrecord with actions in parts; `changes` replace features of every episode."""
    folder.mkdir(exist_ok=True)
    data = b""
    for number, count in enumerate(steps):
        random = np.random.default_rng(number)
        features = {
            "steps/is_first": (np.arange(count) == 0).astype(np.int64),
            "steps/action/world_vector": random.normal(size=3 * count),
            "steps/action/rotation_delta": random.normal(size=3 * count),
            "steps/action/open_gripper": np.ones(count),
            "steps/observation/state": random.normal(size=7 * count),
            "steps/observation/image": [picture(i) for i in range(count)],
            "steps/observation/natural_language_instruction": [b"lift it"] * count,
        }
        data += record(example(features | changes))
    (folder / f"bridge-{split}.tfrecord-00000-of-00001").write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def write_rlds() -> Callable[..., Path]:
    """Writes a small RLDS dataset, see `make_rlds`."""
    return make_rlds


def make_video(path: Path, pictures: np.ndarray, fps: float = 5.0) -> Path:
    """An H.264 file of these frames."""
    writer = VideoWriter(path, fps=fps, height=pictures.shape[1], width=pictures.shape[2])
    writer.write(pictures)
    writer.close()
    return path


@pytest.fixture(scope="session")
def write_video() -> Callable[..., Path]:
    """Writes frames [n, H, W, 3] as a video, at 5 frames a second unless told otherwise."""
    return make_video


def make_paired(root: Path, lengths: Sequence[int] = (12, 9), video: int | None = None, fps: float = 5.0) -> Path:
    """The layout of the released loader, with `video` frames instead of as many as rows."""
    for name in ("meta", "data", "videos"):
        (root / name).mkdir(parents=True)
    lines = []
    for number, count in enumerate(lengths):
        sides = [smooth_frames(video or count, 32, 48, phase) for phase in (number, number + 2)]
        make_video(root / f"videos/{number}.mp4", np.concatenate(sides, axis=2), fps)
        values = np.random.default_rng(number).normal(size=(2, count, 7)).astype(np.float32)
        np.savez(root / f"data/episode_{number}.npz", action=values[0], state=values[1])
        path = f"/somewhere/else/{number}.mp4"
        entry = {"episode_index": number, "num_steps": count, "instruction": f"do {number}", "video_path": path}
        lines.append(json.dumps(entry) + "\n")
    (root / "meta/episodes.jsonl").write_text("".join(lines))
    return root


@pytest.fixture(scope="session")
def write_paired() -> Callable[..., Path]:
    """Writes a small paired [sim|real] dataset, see `make_paired`."""
    return make_paired
