"""The cache returns exactly what was put in, or says why it does not."""

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from simforcing.data.cache import (
    INDEX,
    CacheWriter,
    differences,
    open_cache,
    read_cache,
    read_header,
    source_hash,
    write_cache,
)
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
        ({"clip": {"frames": 21, "stride": 1}}, "with clip.frames = 13, now clip.frames = 21"),
        ({"codec": "wan", "source": "cd"}, "with codec = pca-4x8x8, source = ab, now codec = wan, source = cd"),
    ],
)
def test_mismatch_is_refused_with_both_values(tmp_path, expect, message):
    directory = write_cache(tmp_path / "c", HEADER, shards())
    for read in (read_cache, open_cache):
        with pytest.raises(SimForcingError, match=message):
            read(directory, {"source": "ab"} | expect)


def test_differences_name_nested_keys_of_either_side():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        ("a.c", 2, 3),
        ("d", "nothing", 4),
    ]


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
    with pytest.raises(SimForcingError, match=r"shard-00001\.safetensors: shard is damaged, \d+ bytes instead of"):
        read_cache(directory, {})
    shard.unlink()
    with pytest.raises(SimForcingError, match=r"shard-00001\.safetensors: shard is missing"):
        read_cache(directory, {})
    shard.write_bytes(b"\xff" * len(whole))
    with pytest.raises(SimForcingError, match=r"shard-00001\.safetensors: shard is missing or damaged"):
        read_cache(directory, {})
    (directory / INDEX).write_text("{}")
    with pytest.raises(SimForcingError, match="encode again"):
        read_cache(directory, {})
    with pytest.raises(SimForcingError, match="not a cache"):
        read_cache(tmp_path, {})


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=40)
def test_a_flipped_bit_anywhere_in_a_shard_is_found(tmp_path_factory, place, bit):
    directory = write_cache(tmp_path_factory.mktemp("bit") / "c", HEADER, shards())
    good = read_cache(directory, {})
    path = directory / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = read_cache(directory, {})
    except SimForcingError as error:
        assert "shard-00001.safetensors" in str(error)
        return
    # Only what nothing is read from may differ: the spaces that fill up the file's own header.
    assert all(np.array_equal(found[k], good[k]) for k in good)


def test_rows_that_are_not_asked_for_are_not_looked_at(tmp_path):
    directory = write_cache(tmp_path / "c", HEADER, shards())
    path = directory / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    last = list(shards())[1]["real"][1].tobytes()
    place = content.find(last)
    content[place + 5] ^= 1
    path.write_bytes(content)
    rows = open_cache(directory, {}).rows("real")
    written = np.concatenate([s["real"] for s in list(shards())[:2]])
    np.testing.assert_array_equal(rows.take(np.array([3, 0])), written[[3, 0]])
    with pytest.raises(SimForcingError, match=r"shard-00001\.safetensors: shard is damaged \(row 1 of real"):
        rows.take(np.array([0, 4]))


def test_a_shard_of_another_cache_is_refused(tmp_path):
    directory = write_cache(tmp_path / "c", HEADER, shards())
    other = write_cache(tmp_path / "d", HEADER | {"source": "cd"}, shards())
    name = "shard-00000.safetensors"
    (directory / name).write_bytes((other / name).read_bytes())
    with pytest.raises(SimForcingError, match=r"shard of another cache \(source = cd, here ab\)"):
        read_cache(directory, {})


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
@settings(max_examples=40)
def test_rows_equal_the_array_in_memory(tmp_path_factory, lengths, data):
    rng = np.random.default_rng(len(lengths))
    parts = [{"x": rng.normal(size=(n, 2, 3)).astype(np.float16), "n": np.arange(n)} for n in lengths]
    directory = write_cache(tmp_path_factory.mktemp("rows") / "c", {}, parts)
    cache, whole = open_cache(directory, {}), np.concatenate([p["x"] for p in parts])
    asked = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=12))
    rows = cache.rows("x")
    assert (rows.shape, rows.dtype, len(rows)) == (whole.shape, whole.dtype, len(whole))
    np.testing.assert_array_equal(rows.take(np.array(asked)), whole[asked])
    np.testing.assert_array_equal(cache["x"], whole)
    assert sorted(cache) == ["n", "x"] and "y" not in cache
    for wrong in (-1, len(whole)):
        with pytest.raises(IndexError):
            rows.take(np.array([wrong]))


def test_header_is_in_every_shard_and_equal_shards_have_equal_bytes(tmp_path):
    one, two = (write_cache(tmp_path / name, HEADER, shards()) for name in ("a", "b"))
    with safe_open(one / "shard-00002.safetensors", "np") as file:
        assert json.loads(file.metadata()["cache"])["header"] == HEADER
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


# -- shard by shard -------------------------------------------------------------------------------------------------

NAMES = [f"shard-{i:05d}.safetensors" for i in range(6)]


def part(i):
    return {"x": np.random.default_rng(i).normal(size=(400, 50)).astype(np.float32)}


def fill(out):
    """Makes what is missing, and the cache of it."""
    writer = CacheWriter(out, HEADER, NAMES)
    for i, name in enumerate(NAMES):
        if not writer.sound(name):
            writer.save(name, part(i), {"number": i})
    return writer.finish({"clips": 6})


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_was_begun_goes_on_and_equals_what_was_not_interrupted(tmp_path):
    header = fill(tmp_path / "whole")
    assert header == HEADER | {"clips": 6} == read_header(tmp_path / "whole")
    writer = CacheWriter(tmp_path / "c", HEADER, NAMES)
    for i in (4, 1, 2):
        writer.save(NAMES[i], part(i), {"number": i})
    with pytest.raises(SimForcingError, match="only begun, run the same 'simforcing encode' again"):
        open_cache(tmp_path / "c", {})
    damaged = writer.root / NAMES[2]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert [writer.sound(name) for name in NAMES] == [False, True, False, False, True, False]
    kept = (writer.root / NAMES[1]).stat().st_mtime_ns
    fill(tmp_path / "c")
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    assert (tmp_path / "c" / NAMES[1]).stat().st_mtime_ns == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "whole"]
    np.testing.assert_array_equal(read_cache(tmp_path / "c", {})["x"][400:800], part(1)["x"])


def test_what_was_begun_with_other_settings_is_refused(tmp_path):
    CacheWriter(tmp_path / "c", HEADER, NAMES)
    with pytest.raises(SimForcingError, match=r"c\.parts: cache was made with source = ab, now source = cd"):
        CacheWriter(tmp_path / "c", HEADER | {"source": "cd"}, NAMES)
    with pytest.raises(SimForcingError, match="was begun by another version"):
        CacheWriter(tmp_path / "c", HEADER, NAMES[:3])
    fill(tmp_path / "c")
    with pytest.raises(SimForcingError, match="cut into other shards"):
        CacheWriter(tmp_path / "c", HEADER, NAMES[:3])
    with pytest.raises(SimForcingError, match=r"clip.frames = 13, now clip.frames = 9"):
        CacheWriter(tmp_path / "c", HEADER | {"clip": {"frames": 9, "stride": 1}}, NAMES)


def test_a_shard_that_another_run_took_away_is_a_clear_error(tmp_path):
    late = CacheWriter(tmp_path / "c", HEADER, NAMES)
    fill(tmp_path / "c")
    with pytest.raises(SimForcingError, match="another run has put the cache together"):
        late.save(NAMES[0], part(0), {})


def test_a_full_disk_leaves_what_is_finished(tmp_path, monkeypatch):
    writer = CacheWriter(tmp_path / "c", HEADER, NAMES)
    writer.save(NAMES[0], part(0), {})

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(SimForcingError, match=r"No space left.*shards that are finished are intact"):
            writer.save(NAMES[1], part(1), {})
    assert sorted(p.name for p in writer.root.iterdir()) == ["plan.json", NAMES[0]]
    assert writer.sound(NAMES[0])


def fill_until(out, calls):
    """Makes what is missing in a process that is killed at its `calls`-th call (Python's or C's); whether it was."""
    child = os.fork()
    if child == 0:
        left = count(calls, -1)

        def watch(frame, event, argument):
            if event in ("call", "c_call") and next(left) <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(watch)
        fill(out)
        sys.setprofile(None)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_kills_at_random_moments_change_nothing(tmp_path):
    """Each process may do a little more than the one before, since what is there is checked before it goes on."""
    fill(tmp_path / "whole")
    rng, killed = np.random.default_rng(0), 0
    for number in range(6):
        target, patience = tmp_path / f"c{number}", 100.0
        while not target.exists():
            killed += fill_until(target, int(rng.uniform(1, patience)))
            patience *= 1.2
        assert content(target) == content(tmp_path / "whole")
    assert killed >= 25


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
