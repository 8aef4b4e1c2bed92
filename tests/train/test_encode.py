"""Latents of a small paired dataset, to a cache that says what it was made from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from simforcing.data import REAL, SIM, LeRobotWriter, open_dataset
from simforcing.data.cache import read_cache, read_header
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule, load_clip
from simforcing.errors import SimForcingError
from simforcing.model.codec import TinyCodec, TinyCodecConfig, to_unit
from simforcing.model.preparation import Preparation
from simforcing.train import encode
from simforcing.train.batches import from_cache
from simforcing.train.encode import describe, encode_dataset

NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")
RULE = ClipRule(frames=9, height=64, width=64)
LENGTHS = (13, 6, 10)  # the second is shorter than a window
CLIPS = [(0, 0), (0, 2), (0, 4), (2, 0)]  # every other row


def pictures(count: int, phase: float) -> np.ndarray:
    y, x = np.mgrid[0:64, 0:64] / 64
    waves = [np.stack([np.sin(3 * x + 0.3 * i + phase), np.cos(2 * y - 0.2 * i), x * y], -1) for i in range(count)]
    return (127 + 100 * np.array(waves)).astype(np.uint8)


def write(out: Path, cameras: tuple[str, ...] = (REAL, SIM), lengths: tuple[int, ...] = LENGTHS) -> Path:
    rng = np.random.default_rng(0)
    with LeRobotWriter(
        out, fps=5.0, robot="widowx250s", cameras=dict.fromkeys(cameras, (64, 64)),
        state_names=NAMES, action_names=NAMES,
    ) as writer:  # fmt: skip
        for k, n in enumerate(lengths):
            state, action = rng.normal(size=(2, n, 7)).astype(np.float32)
            writer.add_episode({c: pictures(n, k + 2.0 * i) for i, c in enumerate(cameras)}, state, action, f"task {k}")
    return out


@pytest.fixture(scope="module")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("pairs") / "d")


def tiny_codec(seed: int = 0) -> TinyCodec:
    torch.manual_seed(seed)
    codec = TinyCodec(TinyCodecConfig(channels=4, encoder_widths=(8, 8, 8), decoder_widths=(8, 8, 8)))
    with torch.no_grad():
        codec.basis.copy_(torch.randn_like(codec.basis) / codec.basis.shape[1] ** 0.5)
    return codec.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def codec() -> TinyCodec:
    return tiny_codec()


@pytest.fixture(scope="module")
def cache(dataset_path: Path, codec: TinyCodec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoded") / "latents"
    encode_dataset(open_dataset(dataset_path), out, codec, RULE, every=2)
    return out


def test_latents_are_those_of_each_window_with_its_rows(dataset_path: Path, codec: TinyCodec, cache: Path) -> None:
    arrays, dataset = read_cache(cache, {}), open_dataset(dataset_path)
    assert list(zip(arrays["episode"].tolist(), arrays["start"].tolist(), strict=True)) == CLIPS
    assert arrays["real"].shape == arrays["sim"].shape == (4, 4, 3, 8, 8)
    assert arrays["real"].dtype == np.float16
    for i, (episode, start) in enumerate(CLIPS):
        clip = load_clip(dataset[episode], start, RULE, (REAL, SIM))
        for domain, camera in (("real", REAL), ("sim", SIM)):
            expected = codec.encode(to_unit(torch.from_numpy(clip.frames[camera])[None]))[0]
            assert float(expected.std()) > 0.1
            torch.testing.assert_close(torch.from_numpy(arrays[domain][i]).float(), expected, atol=1e-3, rtol=2e-3)
        np.testing.assert_array_equal(arrays["action"][i], dataset[episode].action[start : start + 8])
        np.testing.assert_array_equal(arrays["proprio"][i], dataset[episode].state[start])


def test_header_names_all_that_made_the_latents(dataset_path: Path, codec: TinyCodec, cache: Path) -> None:
    header = read_header(cache)
    assert header["codec"] == codec.identity
    assert header["rule"] == {"frames": 9, "stride": 1, "height": 64, "width": 64}
    assert (header["every"], header["domains"], header["clips"]) == (2, ["real", "sim"], 4)
    assert header["tasks"] == ["task 0", "task 1", "task 2"]
    assert header["action"] == open_dataset(dataset_path).action_convention.to_dict()
    assert [header["tasks"][i] for i in read_cache(cache, {})["task"]] == ["task 0"] * 3 + ["task 2"]


def test_each_clip_carries_the_extremes_of_its_whole_episode(dataset_path: Path, cache: Path) -> None:
    arrays, dataset = read_cache(cache, {}), open_dataset(dataset_path)
    for i, (index, _) in enumerate(CLIPS):
        episode = dataset[index]
        for name, rows in (("action", episode.action), ("state", episode.state)):
            np.testing.assert_array_equal(arrays[f"{name}_min"][i], rows.min(0))
            np.testing.assert_array_equal(arrays[f"{name}_max"][i], rows.max(0))


def test_shards_and_progress_do_not_change_what_is_stored(
    dataset_path: Path, codec: TinyCodec, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(encode, "SHARD", 3)
    out = tmp_path / "latents"
    header = encode_dataset(
        open_dataset(dataset_path), out, codec, RULE, every=2, report=lambda i, n: seen.append((i, n))
    )
    assert seen == [(3, 4), (4, 4)]
    assert header == read_header(out) == read_header(cache)
    a, b = read_cache(out, {}), read_cache(cache, {})
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key].astype(float), b[key].astype(float), atol=2e-3)


def test_a_complete_cache_is_kept(dataset_path: Path, codec: TinyCodec, cache: Path) -> None:
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in cache.iterdir()}

    def report(done: int, total: int) -> None:
        raise AssertionError("encoded again")

    header = encode_dataset(open_dataset(dataset_path), cache, codec, RULE, every=2, report=report)
    assert header == read_header(cache)
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in cache.iterdir()} == before


def test_other_settings_are_refused_by_name(dataset_path: Path, codec: TinyCodec, cache: Path, tmp_path: Path) -> None:
    dataset = open_dataset(dataset_path)
    with pytest.raises(SimForcingError, match="another every;"):
        encode_dataset(dataset, cache, codec, RULE, every=1)
    with pytest.raises(SimForcingError, match="another rule;"):
        encode_dataset(dataset, cache, codec, ClipRule(frames=5), every=2)
    with pytest.raises(SimForcingError, match="another codec;"):
        encode_dataset(dataset, cache, tiny_codec(seed=1), RULE, every=2)
    other = write(tmp_path / "other", lengths=(13, 6, 11))
    with pytest.raises(SimForcingError, match="another source;"):
        encode_dataset(open_dataset(other), cache, codec, RULE, every=2)
    real_only = write(tmp_path / "real", cameras=(REAL,))
    with pytest.raises(SimForcingError, match="another domains, source;"):
        encode_dataset(open_dataset(real_only), cache, codec, RULE, every=2)


def test_a_codec_that_differs_in_any_encoding_weight_is_another(dataset_path: Path) -> None:
    dataset, one = open_dataset(dataset_path), tiny_codec()
    before = describe(dataset, one, RULE, 2)
    changes: dict[str, Callable[[], object]] = {
        "order of the basis": lambda: one.basis.copy_(one.basis.flip(0)),
        "sign of the mean": lambda: one.mean.copy_(-one.mean - 1),
        "shift": lambda: one.shift.add_(1),
        "scale": lambda: one.scale.mul_(2),
        "encoder": lambda: one.encoder[0].weight.mul_(-1),
    }
    for name, change in changes.items():
        change()
        after = describe(dataset, one, RULE, 2)
        assert after["codec"] != before["codec"], name
        assert {k: v for k, v in after.items() if k != "codec"} == {k: v for k, v in before.items() if k != "codec"}
        before = after


def test_what_cannot_be_encoded_is_refused_before_anything_is_written(
    dataset_path: Path, codec: TinyCodec, tmp_path: Path
) -> None:
    dataset, out = open_dataset(dataset_path), tmp_path / "latents"
    with pytest.raises(SimForcingError, match="no episode has the 17 rows of a window"):
        encode_dataset(dataset, out, codec, ClipRule(frames=17))
    with pytest.raises(SimForcingError, match=r"10 frames: the codec takes 1 \+ 4 n"):
        encode_dataset(dataset, out, codec, ClipRule(frames=10))
    with pytest.raises(SimForcingError, match="60x64 pixels"):
        encode_dataset(dataset, out, codec, ClipRule(frames=9, height=60))
    wrist = write(tmp_path / "wrist", cameras=("observation.images.wrist",), lengths=(10,))
    with pytest.raises(SimForcingError, match=r"neither .*real nor .*sim .*cameras: observation\.images\.wrist"):
        encode_dataset(open_dataset(wrist), out, codec, RULE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["wrist"]


def test_what_stops_the_encoding_leaves_nothing(dataset_path: Path, codec: TinyCodec, tmp_path: Path) -> None:
    def report(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_dataset(open_dataset(dataset_path), tmp_path / "latents", codec, RULE, report=report)
    assert list(tmp_path.iterdir()) == []


def test_something_else_in_the_way_is_refused(dataset_path: Path, codec: TinyCodec, tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="not a cache"):
        encode_dataset(open_dataset(dataset_path), tmp_path, codec, RULE)


def test_the_cache_becomes_clips_to_train_on(dataset_path: Path, cache: Path) -> None:
    arrays = read_cache(cache, {})
    stats = Normalizer.fit(arrays["action"].reshape(-1, 7)), Normalizer.fit(arrays["proprio"])
    clips = from_cache(arrays, read_header(cache)["tasks"], Preparation(*stats, rule=RULE, text="hashed-words"))
    batch = clips.only([2]).batch(2, seed=0, step=0)
    assert batch.latents.shape == (2, 4, 3, 8, 8)
    assert torch.equal(batch.latents[0], torch.from_numpy(arrays["real"][3]).float())
    assert float(clips.action.abs().max()) == pytest.approx(1, abs=1e-5)
