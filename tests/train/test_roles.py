"""What training starts from: statistics of whole episodes, clips of each role, models that fit."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from simforcing.data.cache import write_cache
from simforcing.data.episode import ActionConvention
from simforcing.data.stats import Normalizer
from simforcing.data.windows import save_split
from simforcing.errors import SimForcingError
from simforcing.model.codec import load_codec
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel
from simforcing.recipes import recipe
from simforcing.train.batches import LatentClips
from simforcing.train.roles import Data, adapted, student_of
from simforcing.train.validate import exchanged, validation

FOUND = recipe("tiny")


def data(out: Path, *, whole: bool = True, domains: tuple[str, ...] = ("real", "sim")) -> Data:
    """Three episodes of two clips, cached with or without the extremes of whole episodes."""
    codec, rng, episode = load_codec(FOUND.codec), np.random.default_rng(0), np.repeat(np.arange(3, dtype=np.int32), 2)
    arrays: dict[str, np.ndarray] = {
        "action": rng.uniform(-1, 1, (6, 12, 7)).astype(np.float32),
        "proprio": rng.uniform(-1, 1, (6, 7)).astype(np.float32),
        "episode": episode, "start": np.tile(np.arange(2, dtype=np.int32), 3), "task": np.zeros(6, np.int32),
    }  # fmt: skip
    arrays |= {d: np.zeros((6, *codec.latent_shape(13, 64, 64)), np.float16) for d in domains}
    if whole:
        span = np.repeat(np.array([2, 3, 9], np.float32)[episode][:, None], 7, 1)
        arrays |= {"action_min": -span, "action_max": span, "state_min": -span / 2, "state_max": span / 2}
    header = {
        "codec": codec.identity, "rule": asdict(FOUND.rule), "domains": domains, "tasks": ["lift the lid"],
        "action": ActionConvention().to_dict(),
    }  # fmt: skip
    write_cache(out, header, [arrays])
    save_split(out / "split.json", {"train": [0, 1], "val": [2]})
    return Data(out, out / "split.json", FOUND)


def test_statistics_are_those_of_whole_training_episodes(tmp_path: Path) -> None:
    found = data(tmp_path / "new").preparation(FOUND)
    assert found.action_stats.max.tolist() == [3.0] * 7
    assert found.action_stats.min.tolist() == [-3.0] * 7
    assert found.state_stats.max.tolist() == [1.5] * 7


def test_a_cache_without_extremes_gives_statistics_of_its_windows(tmp_path: Path) -> None:
    old = data(tmp_path / "old", whole=False)
    found = old.preparation(FOUND)
    np.testing.assert_array_equal(found.action_stats.max, old.arrays["action"][:4].max((0, 1)))
    np.testing.assert_array_equal(found.state_stats.min, old.arrays["proprio"][:4].min(0))


def test_a_role_gets_the_latents_that_it_looks_at(tmp_path: Path) -> None:
    found = data(tmp_path / "both")
    preparation = found.preparation(FOUND)
    for role, real, sim in (("teacher", False, True), ("student", True, True), ("baseline", True, False)):
        train, val = found.parts(preparation, role)  # type: ignore[arg-type]
        assert (len(train), len(val)) == (4, 2)
        assert all(((c.real is not None), (c.sim is not None)) == (real, sim) for c in (train, val))
    simulated = data(tmp_path / "sim", domains=("sim",))
    with pytest.raises(SimForcingError, match="a student needs real and sim latents, the cache has no real"):
        simulated.parts(preparation, "student")


def test_a_model_for_other_widths_is_not_adapted(new_model: Callable[..., WorldModel]) -> None:
    def stats(width: int) -> Normalizer:
        return Normalizer(-np.ones(width, np.float32), np.ones(width, np.float32))

    preparation = Preparation(stats(7), stats(7))
    start = WorldModel(new_model(sim_condition=False).config, preparation)
    assert adapted(start, preparation).preparation == preparation
    with pytest.raises(SimForcingError, match="takes actions of 7 numbers, the data have 8"):
        adapted(start, replace(preparation, action_stats=stats(8)))
    with pytest.raises(SimForcingError, match="takes states of 7 numbers, the data have 6"):
        adapted(start, replace(preparation, state_stats=stats(6)))


def test_an_imported_video_model_becomes_a_teacher_of_the_data(new_model: Callable[..., WorldModel]) -> None:
    def stats(width: int) -> Normalizer:
        return Normalizer(-np.ones(width, np.float32), np.ones(width, np.float32))

    start = new_model()
    imported = WorldModel(start.config, None)
    imported.load_state_dict(start.state_dict())
    preparation = Preparation(stats(7), stats(7), codec_identity={"channels": start.config.channels})
    made = adapted(imported, preparation)
    assert made.preparation == preparation and made.sim is None
    assert all(torch.equal(v, start.state_dict()[k]) for k, v in made.state_dict().items())
    with pytest.raises(SimForcingError, match="takes latents of"):
        adapted(imported, replace(preparation, codec_identity={"channels": start.config.channels + 1}))
    assert imported.sim is not None
    with torch.no_grad():
        imported.sim.layers[0].bias.fill_(0.1)  # a student's: what it learnt stays
    assert adapted(imported, preparation).sim is not None


def test_validation_of_a_student_sees_both_branches_and_the_condition(
    new_model: Callable[..., WorldModel], new_clips: Callable[..., LatentClips]
) -> None:
    clips, student = new_clips(), student_of(new_model(sim_condition=False)).eval()
    plain = ["flow_0.3", "flow_0.6", "flow_0.9", "action_ratio"]
    real = validation(clips.one_domain("real"))(student)
    assert list(real) == [*plain, "flow"]
    both = validation(clips)(student)
    assert list(both) == [*plain, "flow_real_on", "flow_sim", "flow"]
    assert {k: both[k] for k in plain} == {k: real[k] for k in plain}
    assert real["flow"] == pytest.approx(sum(real[k] for k in plain[:3]) / 3, abs=1e-5)
    mean = sum(real[k] for k in plain[:3]) / 3
    assert both["flow_real_on"] == pytest.approx(mean, abs=2e-5)  # the condition starts at zero
    sim = validation(clips.one_domain("sim"))(student)
    assert both["flow_sim"] == pytest.approx(sum(sim[k] for k in plain[:3]) / 3, abs=2e-5)
    assert abs(both["flow_sim"] - mean) > 1e-3
    assert both["flow"] == pytest.approx(mean, abs=2e-5)
    assert list(validation(clips)(new_model(sim_condition=False))) == [*plain, "flow"]
    json.dumps(both)


def test_actions_are_exchanged_with_clips_of_other_episodes(new_clips: Callable[..., LatentClips]) -> None:
    clips = new_clips()
    rows = torch.tensor([0, 1, 2, 5])  # episodes 10, 10, 11, 12
    given = exchanged(clips, rows)
    sources = [next(i for i in range(len(clips)) if torch.equal(clips.action[i], a)) for a in given]
    assert sorted(sources) == rows.tolist()
    assert all(clips.episode[s] != clips.episode[r] for s, r in zip(sources, rows, strict=True))
