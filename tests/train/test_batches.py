"""Which clips a batch holds, and what it is made of."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simforcing.data.cache import open_cache, read_cache, write_cache
from simforcing.data.stats import Normalizer
from simforcing.errors import SimForcingError
from simforcing.model.preparation import Preparation
from simforcing.train.batches import LatentClips, StoredLatents, from_cache

NewClips = Callable[..., LatentClips]


@pytest.mark.parametrize("size", [1, 3, 10, 14])
def test_every_pass_holds_every_clip_once(new_clips: NewClips, size: int) -> None:
    clips = new_clips(10)
    drawn = [row for step in range(60 // size + 1) for row in clips.rows(size, seed=4, step=step)]
    passes = [drawn[i : i + 10] for i in range(0, 60 - 9, 10)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len({tuple(p) for p in passes}) > 1


def bare(n: int) -> LatentClips:
    """Clips of which only the number matters."""
    empty = torch.zeros(n, 0)
    return LatentClips(empty, empty, torch.zeros(n).long(), {}, torch.arange(n), torch.arange(n))


@given(
    n=st.integers(1, 40), size=st.integers(1, 9), world=st.integers(1, 5), seed=st.integers(0, 9),
    step=st.integers(0, 30),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_processes_share_a_batch_without_overlap(n: int, size: int, world: int, seed: int, step: int) -> None:
    clips = bare(n)
    shares = [clips.rows(size, seed, step, rank, world) for rank in range(world)]
    alone = clips.rows(size * world, seed, step)
    assert all(len(share) == size for share in shares)
    assert [shares[i % world][i // world] for i in range(size * world)] == alone
    # Each of the places of this batch is a sample that can be found again by (seed, epoch, index) alone.
    places = [divmod(place, n) for place in range(step * size * world, (step + 1) * size * world)]
    assert alone == [clips.sample(seed, epoch, index) for epoch, index in places]


@given(n=st.integers(1, 40), seed=st.integers(0, 99), epoch=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(bare(n).sample(seed, epoch, i) for i in range(n)) == list(range(n))


def test_order_of_samples_does_not_change_between_versions() -> None:
    """What a run drew can be drawn again years later: these are numpy's, fixed by (seed, epoch)."""
    assert [bare(10).sample(3, 2, i) for i in range(10)] == np.random.default_rng([3, 2]).permutation(10).tolist()


def test_names_and_batches_are_those_of_the_process(new_clips: NewClips) -> None:
    clips = new_clips(10)
    rows = clips.rows(2, 5, 3, rank=1, world=2)
    assert clips.names(2, 5, 3, 1, 2) == [f"episode {10 + r // 2} start {r % 2}" for r in rows]
    assert torch.equal(clips.batch(2, 5, 3, 1, 2).action, clips.action[rows])


def test_batches_read_ahead_are_the_same(new_clips: NewClips) -> None:
    clips = new_clips(10)
    ahead = clips.batches(3, 1, first=4, rank=1, world=2)
    for step in range(4, 12):
        assert torch.equal(next(ahead).latents, clips.batch(3, 1, step, 1, 2).latents)
    ahead.close()  # type: ignore[attr-defined]


def stored_clips(root: Path, n: int = 12) -> tuple[LatentClips, LatentClips, Path]:
    """The same clips in memory and on disk, in three shards, and the folder."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "action": rng.normal(size=(n, 8, 7)).astype(np.float32),
        "proprio": rng.normal(size=(n, 7)).astype(np.float32),
        "episode": np.repeat(np.arange(n // 3, dtype=np.int32), 3),
        "start": np.tile(np.arange(3, dtype=np.int32), n // 3),
        "task": np.zeros(n, np.int32), "real": rng.normal(size=(n, 4, 3, 2, 2)).astype(np.float16),
    }  # fmt: skip
    third = n // 3
    parts = [{k: v[i : i + third] for k, v in arrays.items()} for i in range(0, n, third)]
    write_cache(root, {"tasks": ["lift"]}, parts)
    stats = Normalizer(np.full(7, -4, np.float32), np.full(7, 4, np.float32))
    prepared = Preparation(action_stats=stats, state_stats=stats, text="hashed-words")
    memory, disk = (from_cache(a, ["lift"], prepared) for a in (read_cache(root, {}), open_cache(root, {})))
    return memory, disk, root


def test_selections_of_selections_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    memory, disk, _ = stored_clips(tmp_path / "c")
    assert isinstance(disk.real, StoredLatents)
    pick = torch.tensor([7, 1, 3, 10, 0])
    for m, d in ((memory, disk), (memory.only([3, 1]), disk.only([3, 1])), (memory.select(pick), disk.select(pick))):
        again = torch.tensor([2, 0, 1])
        for a, b in ((m, d), (m.select(again), d.select(again))):
            rows = torch.arange(len(a)).flip(0)
            assert torch.equal(a.take(rows).latents, b.take(rows).latents)
            assert torch.equal(a.take(rows).action, b.take(rows).action)


def test_damage_is_raised_by_the_batch_that_holds_it_and_names_the_shard(tmp_path: Path) -> None:
    memory, disk, root = stored_clips(tmp_path / "c")
    path = root / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    assert isinstance(memory.real, torch.Tensor)
    bad = 6
    content[content.find(memory.real[bad].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    first = next(step for step in range(6) if bad in disk.rows(2, 0, step))
    ahead = disk.batches(2, 0)
    for step in range(first):
        assert torch.equal(next(ahead).latents, memory.batch(2, 0, step).latents)
    with pytest.raises(SimForcingError, match=r"shard-00001\.safetensors: shard is damaged \(row 2 of real"):
        next(ahead)


def test_rows_follow_from_seed_and_step_alone(new_clips: NewClips) -> None:
    clips = new_clips(10)
    forwards = [clips.rows(4, seed=1, step=s) for s in range(9)]
    backwards = [clips.rows(4, seed=1, step=s) for s in reversed(range(9))]
    assert forwards == backwards[::-1]
    assert forwards != [clips.rows(4, seed=2, step=s) for s in range(9)]
    assert all(type(row) is int for row in forwards[0])


def test_a_batch_pairs_each_clip_with_its_own_numbers_and_prompt(new_clips: NewClips) -> None:
    clips = new_clips(10)
    rows = clips.rows(4, seed=1, step=2)
    batch = clips.batch(4, seed=1, step=2)
    assert clips.real is not None
    assert clips.sim is not None
    for i, row in enumerate(rows):
        assert torch.equal(batch.latents[i], clips.real[row])
        assert batch.sim_latents is not None
        assert torch.equal(batch.sim_latents[i], clips.sim[row])
        assert torch.equal(batch.action[i], clips.action[row])
        assert torch.equal(batch.proprio[i], clips.proprio[row])
        for domain, text, mask in (
            ("real", batch.text, batch.text_mask), ("sim", batch.sim_text, batch.sim_text_mask),
        ):  # fmt: skip
            assert text is not None
            assert mask is not None
            assert torch.equal(text[i], clips.text[domain][0][row % 2])
            assert torch.equal(mask[i], clips.text[domain][1][row % 2])
    names = [f"episode {10 + row // 2} start {row % 2}" for row in rows]
    assert clips.names(4, seed=1, step=2) == names


def test_half_precision_latents_become_float32(new_clips: NewClips) -> None:
    clips = new_clips()
    assert clips.real is not None
    batch = replace(clips, real=clips.real.half()).batch(2, 0, 0)
    assert batch.latents.dtype == torch.float32


def test_one_domain_is_learnt_alone_under_its_own_prompt(new_clips: NewClips) -> None:
    clips, rows = new_clips(), torch.tensor([1, 6])
    both = clips.take(rows)
    real, sim = (clips.one_domain(domain).take(rows) for domain in ("real", "sim"))
    assert torch.equal(real.latents, both.latents)
    assert torch.equal(real.text, both.text)
    assert real.sim_latents is None
    assert both.sim_latents is not None
    assert both.sim_text is not None
    assert torch.equal(sim.latents, both.sim_latents)
    assert torch.equal(sim.text, both.sim_text)
    assert sim.sim_latents is None
    with pytest.raises(SimForcingError, match="paired"):
        real.simulated()
    with pytest.raises(SimForcingError, match="neither real nor simulated"):
        clips.one_domain("real").one_domain("sim").take(rows)


def test_only_the_clips_of_the_episodes_asked_for(new_clips: NewClips) -> None:
    clips = new_clips(10)
    part = clips.only([12, 10, 99])
    assert part.episode.tolist() == [10, 10, 12, 12]
    assert len(part) == 4
    assert part.real is not None
    assert clips.real is not None
    assert torch.equal(part.real, clips.real[[0, 1, 4, 5]])
    assert torch.equal(part.take(torch.tensor([2])).text, clips.take(torch.tensor([4])).text)
    with pytest.raises(SimForcingError, match=r"no clips of episodes \[99\]"):
        clips.only([99])


def test_clips_of_a_cache_are_normalised_and_carry_embedded_prompts() -> None:
    rng = np.random.default_rng(0)
    low, high = np.full(7, -2, np.float32), np.full(7, 2, np.float32)
    preparation = Preparation(
        action_stats=Normalizer(low, high), state_stats=Normalizer(2 * low, 2 * high), text="hashed-words",
        text_pooling="tokens",
    )  # fmt: skip
    arrays: dict[str, np.ndarray] = {
        "action": rng.uniform(-2, 2, (3, 8, 7)).astype(np.float32),
        "proprio": rng.uniform(-4, 4, (3, 7)).astype(np.float32),
        "episode": np.array([0, 0, 1], np.int32),
        "start": np.array([0, 2, 0], np.int32),
        "task": np.array([1, 1, 0], np.int32),
        "real": rng.normal(size=(3, 4, 3, 2, 2)).astype(np.float16),
    }
    tasks = ["put the lid on the pot", "close the drawer"]
    clips = from_cache(arrays, tasks, preparation)
    torch.testing.assert_close(clips.action, torch.from_numpy(arrays["action"]) / 2)
    torch.testing.assert_close(clips.proprio, torch.from_numpy(arrays["proprio"]) / 4)
    assert clips.sim is None
    assert (clips.episode.dtype, clips.task.dtype) == (torch.int64, torch.int64)
    batch = clips.take(torch.tensor([2, 0]))
    assert torch.equal(batch.latents, torch.from_numpy(arrays["real"][[2, 0]]).float())
    expected: Any = preparation.context([tasks[0], tasks[1]], "real")
    assert torch.equal(batch.text, expected[0])
    assert torch.equal(batch.text_mask, expected[1])
    assert not torch.equal(expected[0], preparation.context(tasks, "sim")[0])
    pooled = from_cache(arrays, tasks, replace(preparation, text_pooling="mean"))
    assert pooled.text["real"][0].shape == (2, 1, 384)
    mean = expected[0][0][expected[1][0]].mean(0)
    torch.testing.assert_close(pooled.text["real"][0][0, 0], mean)
