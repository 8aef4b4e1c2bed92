"""From pictures and stored actions to predicted pictures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule
from simforcing.errors import InputError, SimForcingError
from simforcing.model.codec import TinyCodec, TinyCodecConfig, to_unit
from simforcing.model.experts import ExpertConfig
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.predict import predictor
from simforcing.predict.predictor import Predictor, Start
from simforcing.predict.sampler import Guidance, Inputs, sample, start_noise

RULE = ClipRule(frames=9, height=16, width=32)
CLIPS = 5


@pytest.fixture(scope="module")
def codec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("codec") / "codec.safetensors"
    torch.manual_seed(0)
    codec = TinyCodec(TinyCodecConfig(channels=4, encoder_widths=(8, 8, 8), decoder_widths=(8, 8, 8)))
    with torch.no_grad():
        codec.basis.copy_(torch.linalg.qr(torch.randn(768, 4))[0].T)
    codec.save(path)
    return path


@pytest.fixture(scope="module")
def model(codec_file: Path) -> WorldModel:
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "text_dim": 384, "freq_dim": 16}
    ones = np.ones(7, np.float32)
    preparation = Preparation(
        action_stats=Normalizer(-2 * ones, 2 * ones), state_stats=Normalizer(-4 * ones, 4 * ones), rule=RULE,
        codec=str(codec_file), codec_identity=TinyCodec.load(codec_file).identity, text="hashed-words",
    )  # fmt: skip
    torch.manual_seed(0)
    config = WorldModelConfig(ExpertConfig(24, 48, **sizes), ExpertConfig(16, 32, **sizes), channels=4)
    found = WorldModel(config, preparation)
    assert found.sim is not None
    with torch.no_grad():
        for parameter in found.sim.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return found


@pytest.fixture
def start() -> Start:
    rng = np.random.default_rng(0)
    real, sim = rng.integers(0, 256, (2, CLIPS, 16, 32, 3), dtype=np.uint8)
    return Start(
        real, rng.uniform(-2, 2, (CLIPS, 8, 7)).astype(np.float32), rng.uniform(-4, 4, (CLIPS, 7)).astype(np.float32),
        ["lift the lid", "close the drawer", "lift the lid", "push the block", "lift the lid"], sim,
        [11, 12, 13, 14, 15],
    )  # fmt: skip


def both(found: Predictor, start: Start) -> tuple[Tensor, Tensor]:
    sim = found.simulation(start, 1)
    return sim, found.real(start, 2, sim, Guidance(0.6))


def test_one_text_is_no_list_of_instructions() -> None:
    model = WorldModel.from_pretrained("bundled-student")
    frame = np.zeros((4, 64, 64, 3), np.uint8)
    with pytest.raises(InputError, match="instruction is one text, it must be a list"):
        model.predict(frame, frame, np.zeros((4, 12, 7), np.float32), np.zeros((4, 7), np.float32), "pick")  # as long


def test_a_prediction_is_the_sampler_on_prepared_inputs(model: WorldModel, start: Start) -> None:
    found = Predictor(model)
    sim, real = both(found, start)
    assert sim.shape == real.shape == (CLIPS, 4, 3, 2, 4)
    preparation = found.preparation
    action, proprio = torch.from_numpy(start.action) / 2, torch.from_numpy(start.proprio) / 4

    def inputs(domain: str) -> Inputs:
        return Inputs(action, proprio, *preparation.context(start.tasks, domain))  # type: ignore[arg-type]

    assert start.sim_first is not None
    first_real, first_sim = (
        found.codec.encode(to_unit(torch.from_numpy(f[:, None]))) for f in (start.real_first, start.sim_first)
    )
    noise = start_noise(first_real, 3, [11, 12, 13, 14, 15])
    expected = sample(model, first_sim, inputs("sim"), noise, 1)
    torch.testing.assert_close(sim, expected, atol=1e-5, rtol=1e-5)
    expected = sample(model, first_real, inputs("real"), noise, 2, sim, Guidance(0.6))
    torch.testing.assert_close(real, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(real[:, :, :1], first_real, atol=1e-6, rtol=0)
    assert not model.training


@pytest.mark.parametrize("batch", [1, 2])
def test_a_clip_does_not_depend_on_its_batch(
    model: WorldModel, start: Start, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    found = Predictor(model)
    assert predictor.BATCH == 16
    together = both(found, start)
    frames = found.decode(together[1])
    monkeypatch.setattr(predictor, "BATCH", batch)
    apart = both(found, start)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    difference = frames.astype(int) - found.decode(apart[1])
    assert frames.shape == (CLIPS, 9, 16, 32, 3)
    assert np.abs(difference).max() <= 1
    alone = torch.cat([found.encode(video[None]) for video in frames])
    torch.testing.assert_close(found.encode(frames), alone, atol=1e-5, rtol=1e-5)


def test_a_clip_does_not_depend_on_its_company(model: WorldModel, start: Start) -> None:
    found = Predictor(model)
    _, real = both(found, start)
    part = start.part(slice(3, 5))
    assert (len(part), part.seeds) == (2, [14, 15])
    torch.testing.assert_close(both(found, part)[1], real[3:], atol=1e-5, rtol=1e-5)


def test_seeds_are_counted_where_none_are_given(model: WorldModel, start: Start) -> None:
    found, plain = Predictor(model), replace(start, seeds=None)
    counted = replace(start, seeds=[0, 1, 2, 3, 4])
    assert torch.equal(found.real(plain, 1), found.real(counted, 1))
    assert plain.part(slice(2, 4)).seeds == [2, 3]
    other = replace(start, seeds=[0, 1, 2, 3, 99])
    difference = (found.real(other, 1) - found.real(counted, 1)).flatten(1).abs().amax(1)
    assert (difference > 1e-3).tolist() == [False, False, False, False, True]


def test_frames_start_with_the_given_picture_as_the_codec_shows_it(model: WorldModel, start: Start) -> None:
    found = Predictor(model)
    frames = found.decode(found.real(start, 1))
    assert frames.dtype == np.uint8
    shown = found.decode(found.encode(start.real_first[:, None]))
    assert np.abs(frames[:, :1].astype(int) - shown).max() <= 1


def test_exchanged_actions_change_the_prediction_and_nothing_else_does(model: WorldModel, start: Start) -> None:
    found, order = Predictor(model), np.array([1, 0, 2, 3, 4])
    other = start.with_actions_of(order)
    assert np.array_equal(other.action, start.action[order])
    assert other.real_first is start.real_first
    changed = (found.real(other, 1) - found.real(start, 1)).flatten(1).abs().amax(1)
    assert (changed > 1e-4).tolist() == [True, True, False, False, False]


def test_without_simulated_first_frame_there_is_no_simulation(model: WorldModel, start: Start) -> None:
    found, plain = Predictor(model), replace(start, sim_first=None)
    with pytest.raises(SimForcingError, match="needs its first frame"):
        found.simulation(plain, 1)
    assert torch.equal(found.real(plain, 1), found.real(start, 1))


def test_guidance_without_simulation_is_refused(model: WorldModel, start: Start) -> None:
    with pytest.raises(SimForcingError, match=r"w = 0\.6 needs simulation"):
        Predictor(model).real(start, 1, None, Guidance(0.6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, real_first=s.real_first[:, :, :16]), r"first_real .*\[5, 16, 16, 3\].*\[5, 16, 32, 3\]"),
        (lambda s: replace(s, real_first=s.real_first[:4]), r"first_real has shape \[4, 16, 32, 3\].*\[5, 16, 32, 3\]"),
        (lambda s: replace(s, sim_first=s.sim_first[:4]), r"first_sim has shape \[4, 16, 32, 3\].*\[5, 16, 32, 3\]"),
        (lambda s: replace(s, action=s.action[:, :7]), r"action has shape \[5, 7, 7\], it must be \[5, 8, 7\]"),
        (lambda s: replace(s, action=s.action[:, :, :6]), r"action has shape \[5, 8, 6\], it must be \[5, 8, 7\]"),
        (lambda s: replace(s, action=s.action * np.nan), r"action of shape \[5, 8, 7\] holds NaN"),
        (lambda s: replace(s, proprio=s.proprio[:4]), r"proprio has shape \[4, 7\], it must be \[5, 7\]"),
        (lambda s: replace(s, proprio=s.proprio * np.nan), r"proprio of shape \[5, 7\] holds NaN"),
        (lambda s: replace(s, seeds=[1, 2]), "seeds has 2 numbers, it must have 5"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    model: WorldModel, start: Start, change: Callable[[Start], Start], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Predictor(model).real(change(start), 1)
    with pytest.raises(SimForcingError, match=message):
        Predictor(model).predict(change(start), 0.6, 1, 1)


def test_the_front_door_refuses_too(model: WorldModel, start: Start) -> None:
    assert start.sim_first is not None
    with pytest.raises(ValueError, match=r"action has shape \[4, 8, 7\], it must be \[5, 8, 7\]"):
        model.predict(start.real_first, start.sim_first, start.action[:4], start.proprio, start.tasks)


def test_a_model_that_does_not_say_how_its_inputs_are_prepared_is_refused(model: WorldModel) -> None:
    with pytest.raises(SimForcingError, match="does not say how its inputs are prepared"):
        Predictor(WorldModel(model.config))


def test_a_codec_of_other_latents_is_refused(model: WorldModel, codec_file: Path, tmp_path: Path) -> None:
    codec = TinyCodec.load(codec_file)
    codec.basis.neg_()
    codec.save(tmp_path / "other.safetensors")
    assert model.preparation is not None
    other = replace(model.preparation, codec=str(tmp_path / "other.safetensors"))
    with pytest.raises(SimForcingError, match="but the model was trained with"):
        Predictor(WorldModel(model.config, other))
    with pytest.raises(SimForcingError, match=r"the codec given is .* but the model was trained with"):
        Predictor(model, codec)


def test_a_saved_model_predicts_the_same(model: WorldModel, start: Start, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    loaded = WorldModel.from_pretrained(tmp_path / "model")
    assert loaded.preparation is not None
    assert loaded.preparation.to_dict() == Predictor(model).preparation.to_dict()
    for a, b in zip(both(Predictor(loaded), start), both(Predictor(model), start), strict=True):
        assert torch.equal(a, b)
