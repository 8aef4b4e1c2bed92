"""The cache returns exactly what was put in, or says why it does not."""

import json

import numpy as np
import pytest

from simforcing.data.cache import INDEX, read_cache, read_header, source_hash, write_cache
from simforcing.errors import SimForcingError

HEADER = {"codec": "pca-4x8x8", "resolution": [64, 64], "clip": {"frames": 13, "stride": 1}, "source": "ab"}


def shards():
    rng = np.random.default_rng(0)
    for n in (3, 2):
        yield {"real": rng.normal(size=(n, 4, 5)).astype(np.float32), "mask": np.ones((n, 2), np.uint8)}
    yield {"prompt": np.arange(6, dtype=np.float16).reshape(2, 3)}


def test_round_trip_joins_shards(tmp_path):
    directory = write_cache(tmp_path / "c", HEADER, shards())
    arrays = read_cache(directory, {"codec": "pca-4x8x8", "clip": {"stride": 1, "frames": 13}, "resolution": (64, 64)})
    written = list(shards())
    np.testing.assert_array_equal(arrays["real"], np.concatenate([s["real"] for s in written[:2]]))
    assert arrays["mask"].shape == (5, 2) and arrays["mask"].dtype == np.uint8
    np.testing.assert_array_equal(arrays["prompt"], written[2]["prompt"])
    assert arrays["prompt"].dtype == np.float16
    assert read_header(directory) == HEADER


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ({"codec": "wan"}, "with codec = pca-4x8x8, now codec = wan"),
        ({"resolution": [64, 96]}, r"resolution = \[64, 64\], now resolution = \[64, 96\]"),
        ({"normalisation": "x"}, "normalisation = nothing, now normalisation = x"),
    ],
)
def test_mismatch_is_refused_with_both_values(tmp_path, expect, message):
    directory = write_cache(tmp_path / "c", HEADER, shards())
    with pytest.raises(SimForcingError, match=message):
        read_cache(directory, {"source": "ab"} | expect)


def test_failure_while_writing_leaves_nothing(tmp_path):
    def broken():
        yield {"a": np.zeros(3)}
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_cache(tmp_path / "c", HEADER, broken())
    with pytest.raises(SimForcingError, match="no shards"):
        write_cache(tmp_path / "c", HEADER, [])
    assert list(tmp_path.iterdir()) == []


def test_refuses_existing_and_unstorable(tmp_path):
    directory = write_cache(tmp_path / "c", HEADER, shards())
    with pytest.raises(SimForcingError, match="already exists"):
        write_cache(directory, HEADER, shards())
    with pytest.raises(SimForcingError, match="cannot be stored as JSON"):
        write_cache(tmp_path / "d", {"x": np.zeros(2)}, shards())


def test_damage_is_named(tmp_path):
    directory = write_cache(tmp_path / "c", HEADER, shards())
    shard = directory / "shard-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    with pytest.raises(SimForcingError, match=r"shard-00001\.safetensors: shard is missing or damaged"):
        read_cache(directory, {})
    shard.unlink()
    with pytest.raises(SimForcingError, match="missing or damaged"):
        read_cache(directory, {})
    shard.write_bytes((directory / "shard-00000.safetensors").read_bytes())
    with pytest.raises(SimForcingError, match="does not hold what"):
        read_cache(directory, {})
    (directory / INDEX).write_text("{}")
    with pytest.raises(SimForcingError, match="encode again"):
        read_cache(directory, {})
    with pytest.raises(SimForcingError, match="not a cache"):
        read_cache(tmp_path, {})


def test_header_is_in_every_shard(tmp_path):
    from safetensors import safe_open

    directory = write_cache(tmp_path / "c", HEADER, shards())
    with safe_open(directory / "shard-00002.safetensors", "np") as file:
        assert json.loads(file.metadata()["header"]) == HEADER


def test_source_hash_sees_every_change(write_dataset, tmp_path):
    first, second = write_dataset(tmp_path / "a"), write_dataset(tmp_path / "b")
    assert source_hash(first) == source_hash(second)
    info = second / "meta" / "info.json"
    info.write_text(info.read_text().replace("widowx", "widowy"))
    assert source_hash(first) != source_hash(second)
    video = next(first.rglob("*.mp4"))
    before = source_hash(first)
    video.write_bytes(video.read_bytes() + b"\0")
    assert source_hash(first) != before
