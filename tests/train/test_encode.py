"""Latents of a small paired dataset, to a cache that says what it was made from."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from simforcing.data import REAL, SIM, LeRobotWriter, open_dataset
from simforcing.data.audit import open_checked
from simforcing.data.cache import open_cache, read_cache, read_header, write_cache
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule, load_clip
from simforcing.errors import SimForcingError
from simforcing.model.codec import TinyCodec, TinyCodecConfig, to_unit
from simforcing.model.preparation import Preparation
from simforcing.model.text import PROMPTS
from simforcing.model.umt5 import cache_path
from simforcing.train import encode
from simforcing.train.batches import from_cache
from simforcing.train.encode import cut, describe, encode_dataset, positions, windows
from simforcing.train.words import LazyText, StoredText, Words, reading, weights

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


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    """A shard an episode."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encode, "SHARD", 1)
        yield


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


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
    assert (header["every"], header["domains"], header["resolution"]) == (2, ["real", "sim"], [64, 64])
    assert header["normalisation"]["pixels"] == [-1, 1]
    assert header["text"] is None
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
    seen: list[tuple[str, int, int]] = []
    out = tmp_path / "latents"
    made = encode_dataset(open_dataset(dataset_path), out, codec, RULE, every=2, report=lambda *what: seen.append(what))
    assert seen == [("encoding", 3, 4), ("encoding", 4, 4)]
    assert made.header == read_header(out) == read_header(cache)
    assert made.complete
    monkeypatch.setattr(encode, "SHARD", 128)
    monkeypatch.setattr(encode, "GROUP", 9)
    monkeypatch.setattr(encode, "PIXELS", 1)  # one clip at a time
    one = tmp_path / "one"
    encode_dataset(open_dataset(dataset_path), one, codec, RULE, every=2)
    assert len(list(one.glob("shard-*"))) == 1
    a, b, c = read_cache(out, {}), read_cache(cache, {}), read_cache(one, {})
    assert a.keys() == b.keys() == c.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])
        np.testing.assert_allclose(c[key].astype(float), b[key].astype(float), atol=2e-3)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("group", [1, 6, 256])
def test_windows_equal_single_clips(
    dataset_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int, group: int
) -> None:
    monkeypatch.setattr(encode, "GROUP", group)
    monkeypatch.setattr(encode, "PIXELS", 3 * 48 * 40 * 3 * 2)  # two clips at a time
    rule, episode = ClipRule(frames=3, stride=stride, height=48, width=40), open_dataset(dataset_path)[0]
    first = [0, 1, 2, 5, 8]
    found = np.concatenate(list(windows(episode, SIM, first, rule)))
    expected = [load_clip(episode, s, rule, (SIM,)).frames[SIM] for s in first]
    np.testing.assert_array_equal(found, np.stack(expected))


def test_shards_hold_whole_episodes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "SHARD", 5)
    assert cut([0, 1, 2, 4, 5], [1, 12, 2, 1, 1]) == ((0, 1), (2, 4, 5))
    assert cut([0, 1], [22, 1]) == ((0,), (1,))


def test_a_complete_cache_is_kept(dataset_path: Path, codec: TinyCodec, cache: Path) -> None:
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in cache.glob("shard-*")}
    bytes_before = content(cache)
    seen: list[str] = []
    made = encode_dataset(
        open_dataset(dataset_path), cache, codec, RULE, every=2, report=lambda stage, *_: seen.append(stage)
    )
    assert set(seen) == {"checking"}
    assert made.header == read_header(cache)
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in cache.glob("shard-*")} == before
    assert content(cache) == bytes_before


def test_a_damaged_shard_of_a_complete_cache_is_named_and_made_again(
    dataset_path: Path, codec: TinyCodec, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "latents"
    shutil.copytree(cache, out)
    path = out / "shard-00000.safetensors"
    broken = bytearray(path.read_bytes())
    broken[-9] ^= 4
    path.write_bytes(broken)
    with pytest.raises(SimForcingError, match=r"shard-00000\.safetensors: shard is damaged"):
        read_cache(out, {})
    encode_dataset(open_dataset(dataset_path), out, codec, RULE, every=2)
    assert content(out) == content(cache)


def test_other_settings_are_refused_by_key_and_both_values(
    dataset_path: Path, codec: TinyCodec, cache: Path, tmp_path: Path
) -> None:
    dataset = open_dataset(dataset_path)
    with pytest.raises(SimForcingError, match="with every = 2, now every = 1; encode to another directory"):
        encode_dataset(dataset, cache, codec, RULE, every=1)
    with pytest.raises(SimForcingError, match=r"with rule\.frames = 9, now rule\.frames = 5"):
        encode_dataset(dataset, cache, codec, replace(RULE, frames=5), every=2)
    with pytest.raises(SimForcingError, match=r"resolution = \[64, 64\], .*now .*resolution = \[64, 32\]"):
        encode_dataset(dataset, cache, codec, replace(RULE, width=32), every=2)
    other = tiny_codec(seed=1)
    with pytest.raises(SimForcingError) as error:
        encode_dataset(dataset, cache, other, RULE, every=2)
    for codec_ in (codec, other):
        assert f"codec.fingerprint = {codec_.identity['fingerprint']}" in str(error.value)
    longer = write(tmp_path / "other", lengths=(13, 6, 11))
    with pytest.raises(SimForcingError, match=r"with source = [0-9a-f]{64}, now source = [0-9a-f]{64}"):
        encode_dataset(open_dataset(longer), cache, codec, RULE, every=2)
    real_only = write(tmp_path / "real", cameras=(REAL,))
    with pytest.raises(SimForcingError, match=r"domains = \['real', 'sim'\], source.*now domains = \['real'\]"):
        encode_dataset(open_dataset(real_only), cache, codec, RULE, every=2)
    with pytest.raises(SimForcingError, match=r"with text = None, now text = "):
        encode_dataset(dataset, cache, codec, RULE, every=2, words=Words("hashed-words", 32))


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


def test_what_was_interrupted_goes_on_and_equals_what_was_not(
    dataset_path: Path, codec: TinyCodec, cache: Path, tmp_path: Path
) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "latents"
    dataset = open_dataset(dataset_path)
    with pytest.raises(KeyboardInterrupt):
        encode_dataset(dataset, out, codec, RULE, every=2, report=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["latents.parts"]
    first = tmp_path / "latents.parts" / "shard-00000.safetensors"
    (tmp_path / "latents.parts" / "shard-00001.safetensors.partial-999999999").write_bytes(b"half")
    kept = first.stat().st_ino
    with pytest.raises(SimForcingError, match="with every = 2, now every = 1"):
        encode_dataset(dataset, out, codec, RULE, every=1)
    seen: list[tuple[str, int, int]] = []
    encode_dataset(dataset, out, codec, RULE, every=2, report=lambda *what: seen.append(what))
    assert seen == [("checking", 1, 2), ("encoding", 1, 1)]
    assert content(out) == content(cache)
    assert (out / first.name).stat().st_ino == kept
    assert [p.name for p in tmp_path.iterdir()] == ["latents"]


def test_shares_of_several_machines_are_put_together(
    dataset_path: Path, codec: TinyCodec, cache: Path, tmp_path: Path
) -> None:
    dataset, out = open_dataset(dataset_path), tmp_path / "latents"
    first = encode_dataset(dataset, out, codec, RULE, every=2, shard=(1, 3))
    assert (first.complete, first.left, first.root) == (False, 1, tmp_path / "latents.parts")
    assert encode_dataset(dataset, out, codec, RULE, every=2, shard=(3, 3)).left == 1
    assert encode_dataset(dataset, out, codec, RULE, every=2, shard=(2, 3)).left == 0
    assert not out.exists()

    def report(stage: str, done: int, total: int) -> None:
        assert stage == "checking"

    assert encode_dataset(dataset, out, codec, RULE, every=2, report=report).complete
    assert content(out) == content(cache)
    with pytest.raises(SimForcingError, match="shard 4/3: give i/n"):
        encode_dataset(dataset, tmp_path / "x", codec, RULE, every=2, shard=(4, 3))


@pytest.mark.slow
def test_workers_make_the_same(dataset_path: Path, tmp_path: Path) -> None:
    tiny_codec().save(tmp_path / "codec.safetensors")
    codec = TinyCodec.load(tmp_path / "codec.safetensors")
    dataset = open_dataset(dataset_path)
    encode_dataset(dataset, tmp_path / "one", codec, RULE, every=2)
    with pytest.raises(SimForcingError, match="source of the codec"):
        encode_dataset(dataset, tmp_path / "two", codec, RULE, every=2, workers=2)
    source = str(tmp_path / "codec.safetensors")
    encode_dataset(dataset, tmp_path / "two", codec, RULE, every=2, workers=2, codec_source=source)
    one, two = read_cache(tmp_path / "one", {}), read_cache(tmp_path / "two", {})
    for key in one:
        np.testing.assert_allclose(one[key].astype(float), two[key].astype(float), atol=2e-3)


def test_bad_episodes_are_an_error_or_left_out_and_listed(dataset_path: Path, codec: TinyCodec, tmp_path: Path) -> None:
    """One that the metadata give away, and one whose video is found damaged when it is decoded."""
    bad = tmp_path / "bad"
    shutil.copytree(dataset_path, bad)
    table = next((bad / "data").rglob("*.parquet"))
    _set_nan(table, episode=2)
    with pytest.raises(SimForcingError, match="not finite"):
        open_checked(bad, video=False)
    dataset = open_checked(bad, skip_bad=True, video=False)
    assert positions(dataset) == [0, 1]
    load = dataset._load

    def broken(index: int) -> Any:
        episode = load(index)
        return replace(episode, decode=_undecodable) if index == 0 else episode

    dataset._load = broken
    short = replace(RULE, frames=5)
    with pytest.raises(SimForcingError, match="cannot be decoded"):
        encode_dataset(dataset, tmp_path / "x", codec, short, every=2)
    made = encode_dataset(dataset, tmp_path / "y", codec, short, every=2, skip_bad=True)
    assert [position for position, _ in made.left_out] == [0, 2]
    assert "cannot be decoded" in made.left_out[0][1] and "not finite" in made.left_out[1][1]
    assert made.header["skipped"] == [2]
    assert list(made.header["left_out"]) == ["0", "2"]
    assert set(read_cache(tmp_path / "y", {})["episode"].tolist()) == {1}


def test_episodes_keep_their_numbers_when_others_are_skipped(
    dataset_path: Path, codec: TinyCodec, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(dataset_path, bad)
    _set_nan(next((bad / "data").rglob("*.parquet")), episode=0)
    dataset = open_checked(bad, skip_bad=True, video=False)
    encode_dataset(dataset, tmp_path / "y", codec, RULE, every=2, skip_bad=True)
    arrays = read_cache(tmp_path / "y", {})
    assert arrays["episode"].tolist() == [2]
    np.testing.assert_array_equal(arrays["action"][0], open_dataset(dataset_path)[2].action[:8])


def _undecodable(index: int, camera: str, rows: list[int]) -> np.ndarray:
    raise SimForcingError("episode 0: its video cannot be decoded")


def _set_nan(path: Path, episode: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    action = np.stack(table["action"].to_numpy()).copy()
    action[table["episode_index"].to_numpy() == episode, 0] = np.nan
    place = table.schema.get_field_index("action")
    column = pa.array(list(action), table.schema.field("action").type)
    pq.write_table(table.set_column(place, table.schema.field("action"), column), path)


def test_something_else_in_the_way_is_refused(dataset_path: Path, codec: TinyCodec, tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="not a cache"):
        encode_dataset(open_dataset(dataset_path), tmp_path, codec, RULE)
    (tmp_path / "file").touch()
    with pytest.raises(SimForcingError, match="is a file"):
        encode_dataset(open_dataset(dataset_path), tmp_path / "file", codec, RULE)


def test_latents_that_do_not_fit_are_refused(dataset_path: Path, tmp_path: Path) -> None:
    codec = tiny_codec()
    codec.scale.fill_(1e-9)
    with pytest.raises(SimForcingError, match="do not fit float16"):
        encode_dataset(open_dataset(dataset_path), tmp_path / "x", codec, RULE)


def preparation(arrays: Any, **changes: Any) -> Preparation:
    stats = Normalizer.fit(arrays["action"].reshape(-1, 7)), Normalizer.fit(arrays["proprio"])
    return Preparation(*stats, rule=RULE, **{"text": "hashed-words"} | changes)


def test_the_cache_becomes_clips_to_train_on(dataset_path: Path, cache: Path) -> None:
    arrays = read_cache(cache, {})
    clips = from_cache(arrays, read_header(cache)["tasks"], preparation(arrays))
    batch = clips.only([2]).batch(2, seed=0, step=0)
    assert batch.latents.shape == (2, 4, 3, 8, 8)
    assert torch.equal(batch.latents[0], torch.from_numpy(arrays["real"][3]).float())
    assert float(clips.action.abs().max()) == pytest.approx(1, abs=1e-5)


def test_clips_on_disk_equal_clips_in_memory(cache: Path) -> None:
    arrays, tasks = read_cache(cache, {}), read_header(cache)["tasks"]
    one, two = (from_cache(a, tasks, preparation(arrays)) for a in (arrays, open_cache(cache, {})))
    assert not isinstance(two.real, torch.Tensor)
    for a, b in ((one, two), (one.only([0]), two.only([0])), (one.one_domain("sim"), two.one_domain("sim"))):
        for step in range(4):
            for x, y in zip(a.batch(3, 7, step), b.batch(3, 7, step), strict=True):
                assert (x is None and y is None) or torch.equal(x, y)  # type: ignore[arg-type]
    assert two.real is not None and tuple(two.real.shape) == (4, 4, 3, 8, 8)


# -- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_text(dataset_path: Path, codec: TinyCodec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "latents"
    encode_dataset(open_dataset(dataset_path), out, codec, RULE, every=2, words=Words("hashed-words", 32))
    return out


def test_text_of_the_cache_replaces_the_encoder(with_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, cache = read_header(with_text), open_cache(with_text, {})
    assert header["text"]["encoder"] == header["text_source"] == "hashed-words"
    for changes in ({"text_pooling": "mean"}, {"text_pooling": "tokens"}, {"text_padding": "zeros"}):
        plain = preparation(cache, **changes)
        expected = from_cache(read_cache(with_text, {}), header["tasks"], plain)
        with monkeypatch.context() as patched:
            patched.setattr("simforcing.model.preparation.TextEncoder.load", _no_encoder)
            found = from_cache(cache, header["tasks"], preparation(cache, **changes))
        for domain in ("real", "sim"):
            for x, y in zip(expected.text[domain], found.text[domain], strict=True):  # type: ignore[call-overload]
                assert torch.equal(x, y)


def test_text_that_is_large_stays_on_disk(with_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tasks = open_cache(with_text, {}), read_header(with_text)["tasks"]
    dense = from_cache(cache, tasks, preparation(cache, text_pooling="tokens"))
    monkeypatch.setattr("simforcing.train.words.DENSE", 1000)
    lazy = from_cache(cache, tasks, preparation(cache, text_pooling="tokens"))
    assert isinstance(lazy.text["real"], LazyText)
    for x, y in zip(dense.batch(3, 0, 0), lazy.batch(3, 0, 0), strict=True):
        assert (x is None and y is None) or torch.equal(x, y)  # type: ignore[arg-type]


def test_text_of_another_encoder_or_template_is_not_used(with_text: Path) -> None:
    cache = open_cache(with_text, {})
    for changes in ({"text": "minilm"}, {"prompts": {"real": "Do {task}", "sim": "Do {task}"}}):
        asked = preparation(cache, **changes)
        assert reading(asked, cache) is asked
    stored = StoredText(cache, 32)
    with pytest.raises(SimForcingError, match="has no embedding in"):
        stored.tokens("something else")
    with pytest.raises(SimForcingError, match="text length 4"):
        StoredText(cache, 4).encode([PROMPTS["real"].format(task="task 0")])


def test_embeddings_in_files_are_taken_along_with_their_weights_name(tmp_path: Path) -> None:
    tasks, folder = ["lift", "push"], tmp_path / "t5"
    folder.mkdir()
    for template in ("real", "sim"):
        for task in tasks:
            text = PROMPTS[template].format(task=task)
            tokens = {"context": torch.randn(8, 6).bfloat16(), "mask": torch.arange(8) < 5}
            torch.save(tokens, cache_path(folder, text, 8))
    words = Words(str(folder), 8)
    identity = words.identity(tasks)
    assert identity["templates"] == sorted([PROMPTS["real"], PROMPTS["sim"]])
    assert (identity["stored"], identity["width"]) == ("bfloat16", 6)
    prompts = [p for part in words.parts(tasks) for p in part]
    write_cache(tmp_path / "c", {"text": identity, "tasks": tasks}, [words.embed(prompts)])
    stored = StoredText(open_cache(tmp_path / "c", {}), 8)
    for text in prompts:
        assert torch.equal(stored.tokens(text), words.encoder.tokens(text))
    before = weights(str(folder))
    next(folder.glob("*.pt")).unlink()
    assert weights(str(folder)) != before
    with pytest.raises(SimForcingError, match="nothing there"):
        weights(str(tmp_path / "none"))


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_encoded(
    dataset_path: Path, codec: TinyCodec, tmp_path: Path
) -> None:
    def report(stage: str, done: int, total: int) -> None:
        raise AssertionError(stage)

    with pytest.raises(SimForcingError, match="set the text length"):
        encode_dataset(open_dataset(dataset_path), tmp_path / "x", codec, RULE, words=Words("hashed-words", 3),
                       report=report)  # fmt: skip


def _no_encoder(*_: object) -> None:
    raise AssertionError("the text encoder was asked for")
