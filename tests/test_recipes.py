"""The named configurations: the paper's values, what must be supplied, epochs as steps."""

from dataclasses import fields, replace

import pytest

from simforcing.errors import SimForcingError
from simforcing.model.experts import ExpertConfig, axis_dims
from simforcing.recipes import RECIPES, named, recipe
from simforcing.train.loop import TrainConfig
from simforcing.train.objective import ObjectiveConfig

PAPER = ("bridge-wan5b", "interndata-wan5b")


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_sizes_and_values(name: str) -> None:
    found = named(name)
    shared = {"num_layers": 30, "num_heads": 24, "head_dim": 128, "text_dim": 4096, "freq_dim": 256, "eps": 1e-6}
    assert found.video == ExpertConfig(dim=3072, ffn_dim=14336, **shared)  # type: ignore[arg-type]
    assert found.action == ExpertConfig(dim=1024, ffn_dim=4096, **shared)  # type: ignore[arg-type]
    assert (found.rule.height, found.rule.width) == (224, 320)
    assert (found.text_length, found.text_pooling, found.text_padding) == (128, "tokens", "zeros")
    assert found.action_positions == "index"
    assert found.teacher == found.student == found.baseline
    run = found.student
    assert (run.batch_size, run.epochs, run.samples_per_episode) == (16, 20, 30)
    assert (run.lr, run.warmup, run.final_lr, run.weight_decay, run.betas) == (1e-4, 0.05, 0.01, 0.01, (0.9, 0.95))
    assert run.clip == 1.0
    loss = found.objective
    assert loss == ObjectiveConfig()
    assert (loss.retention, loss.motion_weight, loss.syn_weight) == (0.7, 0.5, 0.1)
    assert (loss.video_weight, loss.real_weight) == (1.0, 1.0)
    assert loss.corrupt_probability == 0.4
    assert (loss.corrupt_keep, loss.corrupt_noise) == ((0.5, 0.9), (0.1, 0.3))


def test_the_papers_clip_rules() -> None:
    bridge, interndata = (named(name).rule for name in PAPER)
    assert (bridge.frames, bridge.stride, bridge.steps, bridge.actions) == (21, 1, 21, 20)
    assert (interndata.frames, interndata.stride, interndata.steps, interndata.actions) == (33, 4, 129, 128)


def test_the_demos_values_are_those_its_bundled_models_were_trained_with() -> None:
    demo, tiny = recipe("demo"), recipe("tiny")
    assert replace(tiny, text=demo.text, text_length=demo.text_length, notes=demo.notes) == demo
    assert (demo.text, tiny.text, demo.codec) == ("minilm", "hashed-words", "bundled")
    assert (demo.video.dim, demo.video.ffn_dim, demo.action.dim, demo.action.ffn_dim) == (192, 576, 96, 192)
    assert (demo.text_length, demo.text_pooling, demo.text_padding) == (32, "mean", "masked")
    assert demo.objective == ObjectiveConfig(motion_weight=0.05, syn_share=0.25)
    assert demo.student == TrainConfig(seconds=360.0, batch_size=8, lr=1e-3, sim_lr_scale=2.0)
    assert demo.teacher == replace(demo.student, batch_size=16, lr=2e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_whole(name: str) -> None:
    found = named(name)
    assert found.video.attention_dim == found.action.attention_dim
    assert found.video.num_layers == found.action.num_layers
    assert found.video.text_dim == found.action.text_dim
    assert all(n > 0 and n % 2 == 0 for n in axis_dims(found.video.head_dim))
    assert (found.rule.frames - 1) % 4 == 0
    assert found.notes


def test_a_small_recipe_says_that_it_is_ours_and_not_measured() -> None:
    notes = " ".join(named("small").notes)
    assert "our own choice" in notes and "no result was measured" in notes


@pytest.mark.parametrize(
    ("typed", "nearest"), [("bridge-wan", "bridge-wan5b"), ("interndata", "interndata-wan5b"), ("smal", "small")]
)
def test_an_unknown_recipe_names_the_nearest(typed: str, nearest: str) -> None:
    for find in (named, recipe):
        with pytest.raises(SimForcingError, match=f"no recipe '{typed}'; did you mean '{nearest}'"):
            find(typed)


def test_what_must_be_supplied_is_asked_for() -> None:
    with pytest.raises(SimForcingError, match=r"--codec .*vae.* and --text umt5:DIR") as both:
        recipe("bridge-wan5b")
    assert "\n" not in str(both.value)
    with pytest.raises(SimForcingError, match=r"give --text umt5:DIR"):
        recipe("bridge-wan5b", codec="wan/vae")
    with pytest.raises(SimForcingError, match=r"give --codec"):
        recipe("bridge-wan5b", text="umt5:wan")


def test_what_is_supplied_replaces_the_recipes_own_and_nothing_else() -> None:
    found = recipe("bridge-wan5b", codec="wan/vae", text="umt5:wan")
    assert (found.codec, found.text) == ("wan/vae", "umt5:wan")
    rest = [f.name for f in fields(found) if f.name not in ("codec", "text")]
    assert [getattr(found, n) for n in rest] == [getattr(named("bridge-wan5b"), n) for n in rest]
    assert recipe("demo") == named("demo")
    assert recipe("small", codec="my.safetensors").codec == "my.safetensors"


@pytest.mark.parametrize(
    ("name", "episodes", "steps"), [("bridge-wan5b", 1952, 9150), ("interndata-wan5b", 2657, 12455)]
)
def test_the_papers_epochs_on_eight_gpus(name: str, episodes: int, steps: int) -> None:
    """20 epochs of 30 windows an episode, 128 clips a step: 1,171,200 / 128, and 1,594,200 / 128 rounded up."""
    run = named(name).student.resolved(clips=999_999, episodes=episodes, processes=8)
    assert (run.steps, run.epochs, run.seconds) == (steps, None, None)
    assert replace(run, steps=None, epochs=20.0) == named(name).student
