"""Windows, resizing and splits: by hand, against Pillow, and as properties."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from simforcing.data import REAL, SIM, open_dataset
from simforcing.data.windows import (
    ClipRule,
    load_clip,
    load_split,
    resize_crop,
    save_split,
    split_episodes,
    starts,
)
from simforcing.errors import SimForcingError

RULE = ClipRule(frames=4, stride=2, height=16, width=24)


def test_rules_of_the_paper():
    bridge, intern = ClipRule(21, 1, 224, 320), ClipRule(33, 4, 224, 320)
    assert (bridge.actions, bridge.steps) == (20, 21)
    assert (intern.actions, intern.steps) == (128, 129)
    with pytest.raises(SimForcingError, match="stride is 0"):
        ClipRule(stride=0)


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 5), st.integers(1, 7))
def test_starts_fit_and_none_is_missed(length, frames, stride, every):
    rule = ClipRule(frames, stride)
    found = starts(length, rule, every)
    assert found == [s for s in range(0, length, every) if s + (frames - 1) * stride <= length - 1]


def test_clip_rows_and_frames(dataset_path):
    episode = open_dataset(dataset_path)[2]
    clip = load_clip(episode, 3, RULE, [REAL, SIM])
    assert (clip.episode, clip.start, clip.task) == (2, 3, "task 0")
    np.testing.assert_array_equal(clip.action, episode.action[3:9])
    np.testing.assert_array_equal(clip.proprio, episode.state[3])
    np.testing.assert_array_equal(clip.frames[SIM], resize_crop(episode.frames(SIM)[3:10:2], 16, 24))
    assert list(clip.frames) == [REAL, SIM]


@pytest.mark.parametrize("start", [-1, 8, 100])
def test_window_outside_is_refused(dataset_path, start):
    episode = open_dataset(dataset_path)[2]
    with pytest.raises(SimForcingError, match=r"episode 2 of .*outside its 14 rows; starts 0 to 7 fit"):
        load_clip(episode, start, RULE, [REAL])


def test_window_longer_than_the_episode_is_refused(dataset_path):
    episode = open_dataset(dataset_path)[1]
    with pytest.raises(SimForcingError, match="use a shorter clip rule"):
        load_clip(episode, 0, ClipRule(13), [REAL])


def test_resize_of_bridge_pictures_equals_pillow(frames):
    picture = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    resized = Image.fromarray(picture).resize((320, 320), Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((0, 48, 320, 272)))
    out = resize_crop(np.stack([picture, picture[::-1]]), 224, 320)
    assert out.shape == (2, 224, 320, 3)
    np.testing.assert_array_equal(out[0], expected)


def test_resize_keeps_what_fits_and_averages_when_shrinking():
    picture = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8)
    assert resize_crop(picture, 64, 64) is picture
    stripes = np.zeros((1, 64, 64, 3), np.uint8)
    stripes[:, :, ::2] = 255
    assert np.abs(resize_crop(stripes, 8, 8).astype(int) - 127).max() <= 8  # antialiased, not every 8th
    with pytest.raises(SimForcingError, match="give uint8 frames"):
        resize_crop(picture.astype(np.float32), 8, 8)


@given(st.integers(2, 90), st.integers(2, 90), st.integers(1, 64), st.integers(1, 64))
def test_resize_always_covers(height, width, new_height, new_width):
    out = resize_crop(np.full((1, height, width, 3), 77, np.uint8), new_height, new_width)
    assert out.shape == (1, new_height, new_width, 3) and (out == 77).all()


@given(st.integers(0, 300), st.lists(st.integers(0, 10), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_fractions_are_disjoint_and_cover(n, weights, seed):
    total = sum(weights) + 1
    parts = {f"part{i}": (w + (i == 0)) / total for i, w in enumerate(weights)}
    split = split_episodes(n, parts, seed)
    together = [episode for episodes in split.values() for episode in episodes]
    assert sorted(together) == list(range(n))
    assert all(abs(len(split[name]) - n * share) <= 1 for name, share in parts.items())
    assert split == split_episodes(n, parts, seed)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(0, 99))
def test_counts_are_exact_and_the_rest_is_the_rest(n, a, b, seed):
    if a + b > n:
        with pytest.raises(SimForcingError, match=f"asks for {a + b} of {n}"):
            split_episodes(n, {"val": a, "test": b, "train": None}, seed)
        return
    split = split_episodes(n, {"val": a, "test": b, "train": None}, seed)
    assert (len(split["val"]), len(split["test"])) == (a, b)
    assert sorted(split["val"] + split["test"] + split["train"]) == list(range(n))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": 0.5, "b": 3}, "mixed"),
        ({"a": -1}, "negative"),
        ({"a": None, "b": None}, "more than one"),
        ({"a": 0.7, "b": 0.7}, "sum to 1.4"),
    ],
)
def test_split_refuses(parts, message):
    with pytest.raises(SimForcingError, match=message):
        split_episodes(10, parts)


def test_split_depends_on_the_seed():
    assert split_episodes(50, {"a": 10}, 0) != split_episodes(50, {"a": 10}, 1)


def test_split_file(tmp_path):
    path = tmp_path / "split.json"
    split = split_episodes(10, {"train": 0.8, "val": 0.2}, 3)
    save_split(path, split, source="data/x")
    assert load_split(path) == split
    assert [p.name for p in tmp_path.iterdir()] == ["split.json"]
    stored = json.loads(path.read_text())
    assert stored["source"] == "data/x" and len(stored["sha256"]) == 64
    stored["episodes"]["val"].append(stored["episodes"]["train"][0])
    path.write_text(json.dumps(stored))
    with pytest.raises(SimForcingError, match="does not match its sha256"):
        load_split(path)
    path.write_text("[]")
    with pytest.raises(SimForcingError, match="not a split file"):
        load_split(path)
    with pytest.raises(SimForcingError, match="no such split file"):
        load_split(tmp_path / "none.json")


def test_split_file_with_a_shared_episode_is_refused(tmp_path):
    path = tmp_path / "s.json"
    with pytest.raises(SimForcingError, match="in two parts"):
        save_split(path, {"train": [0, 1], "val": [1]})
    assert not path.exists()
    body = {"source": "", "episodes": {"train": [0, 1], "val": [1]}}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, **body}))
    with pytest.raises(SimForcingError, match="in two parts"):
        load_split(path)


def test_interndata_rule_takes_every_fourth_frame_and_every_action(tmp_path, write_dataset):
    rule = ClipRule(33, 4, 32, 48)
    assert (rule.steps, rule.actions) == (129, 128)
    dataset = open_dataset(write_dataset(tmp_path / "d", lengths=(131,)))
    assert starts(131, rule) == [0, 1, 2]
    clip = load_clip(dataset[0], 2, rule, [REAL])
    np.testing.assert_array_equal(clip.frames[REAL], dataset[0].frames(REAL, range(2, 131, 4)))
    np.testing.assert_array_equal(clip.action, dataset[0].action[2:130])
    np.testing.assert_array_equal(clip.proprio, dataset[0].state[2])
