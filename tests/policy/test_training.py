"""From demonstrations to a policy that acts: windows, training, its directory, actions."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import simforcing
from simforcing import recipes
from simforcing.cli.main import main
from simforcing.data import LeRobotWriter, open_dataset
from simforcing.data.cache import read_cache
from simforcing.data.episode import ActionConvention
from simforcing.data.stats import Normalizer
from simforcing.data.windows import ClipRule, load_split
from simforcing.errors import InputError, SimForcingError
from simforcing.model.codec import load_codec
from simforcing.model.preparation import Preparation
from simforcing.model.world_model import WorldModel, WorldModelConfig
from simforcing.policy.data import config_of
from simforcing.policy.policy import Policy
from simforcing.policy.preparation import PolicyPreparation, side_by_side
from simforcing.policy.recipe import PolicyRecipe
from simforcing.policy.source import Start
from simforcing.policy.windows import PolicyWindows, after_end, chosen_cameras, latents_padded
from simforcing.recipes import POLICIES, RECIPES, policy_recipe
from simforcing.train import loop
from simforcing.train.recipe import Recipe
from simforcing.train.words import Words

FRONT, WRIST = "observation.images.front", "observation.images.wrist"
CAMERAS = {FRONT: (48, 64), WRIST: (32, 32)}
LENGTHS = (12, 3, 7, 9)
STATE, ACTION = 8, 7
TINY = POLICIES["policy-tiny"]
NANO: PolicyRecipe = replace(
    TINY,
    video=replace(TINY.video, dim=24, ffn_dim=48, num_layers=2, num_heads=2, head_dim=12, freq_dim=16),
    action=replace(TINY.action, dim=16, ffn_dim=32, num_layers=2, num_heads=2, head_dim=12, freq_dim=16),
    rule=ClipRule(frames=9, stride=1, height=16, width=16),
    training=replace(TINY.training, steps=4, batch_size=3, log_every=1),
    window_every=1,
)


def numbers(seed: int, length: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.cumsum(rng.normal(size=(length, width)), axis=0)
    values[:, -1] = rng.integers(0, 2, length)
    return values.astype(np.float32)


def pictures(seed: int, length: int, size: tuple[int, int]) -> np.ndarray:
    y, x = np.mgrid[0 : size[0], 0 : size[1]] / size[0]
    waves = [np.stack([np.sin(3 * x + 0.3 * i + seed), np.cos(2 * y - 0.2 * i), x * y], -1) for i in range(length)]
    return (127 + 100 * np.array(waves)).astype(np.uint8)


def write(out: Path) -> Path:
    """Episodes of two tasks seen by two cameras; actions are changes."""
    convention = ActionConvention(kind="delta", relative_to="state", hz=10.0)
    with LeRobotWriter(
        out, fps=10.0, robot="panda", cameras=CAMERAS, state_names=[f"s{i}" for i in range(STATE)],
        action_names=[f"a{i}" for i in range(ACTION)], meta={"action": convention.to_dict()},
    ) as writer:  # fmt: skip
        for k, n in enumerate(LENGTHS):
            views = {name: pictures(k + 2 * i, n, size) for i, (name, size) in enumerate(CAMERAS.items())}
            writer.add_episode(views, numbers(k, n, STATE), numbers(10 + k, n, ACTION), f"task {k % 2}")
    return out


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("demos") / "d")


@pytest.fixture(autouse=True)
def nano(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A recipe that trains within a second, and one thread, so that equal runs are equal to the bit."""
    before = torch.get_num_threads()
    monkeypatch.setitem(recipes.POLICIES, "nano", NANO)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*words: str | Path) -> int:
    return main([str(word) for word in words])


def train(data: Path, out: Path, *words: str | Path) -> int:
    return run("policy", "train", data, "--out", out, "--recipe", "nano", "--threads", "1", "--device", "cpu", *words)


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")][-1]


def log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def latents(demos: Path) -> Iterator[Path]:
    """Encoded once for all trainings."""
    out = demos.parent / "latents"
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(recipes.POLICIES, "nano", NANO)
        assert train(demos, demos.parent / "none", "--latents", out, "--encode-only") == 0
    assert not (demos.parent / "none").exists()
    yield out


@pytest.fixture(scope="module")
def trained(demos: Path, latents: Path) -> Path:
    """A run of the default setting to its end."""
    out = demos.parent / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(recipes.POLICIES, "nano", NANO)
        assert train(demos, out, "--latents", latents) == 0
    return out


# -- windows --------------------------------------------------------------------------------------------------------


def test_beyond_the_end_nothing_moves_and_the_gripper_stays() -> None:
    actions = numbers(0, 5, ACTION)
    windows = PolicyWindows(ClipRule(frames=9, stride=1, height=16, width=16), (FRONT,), "still")
    window, padded = windows.actions(actions, 3)
    assert padded.tolist() == [False] * 2 + [True] * 6
    np.testing.assert_array_equal(window[:2], actions[3:])
    assert (window[2:, :-1] == 0).all() and (window[2:, -1] == actions[-1, -1]).all()
    window, _ = replace(windows, after_end="last").actions(actions, 3)
    np.testing.assert_array_equal(window[2:], np.tile(actions[-1], (6, 1)))
    assert after_end(ActionConvention()) == "last"
    assert after_end(ActionConvention(kind="delta", relative_to="state")) == "still"


@pytest.mark.parametrize("valid", range(1, 10))
def test_a_latent_frame_is_padded_where_all_its_pictures_are(valid: int) -> None:
    frames = np.arange(9)[None] >= valid
    assert latents_padded(frames).tolist() == [[False, valid <= 1, valid <= 5]]


def test_a_cache_holds_what_a_window_of_the_dataset_is(demos: Path, latents: Path) -> None:
    found, dataset, codec = read_cache(latents, {"kind": "policy"}), open_dataset(demos), load_codec("bundled")
    assert len(found["start"]) == sum(LENGTHS)
    assert found["episode"].tolist() == [k for k, n in enumerate(LENGTHS) for _ in range(n)]
    for row in (0, 9, 13, 30):
        episode, start = dataset[int(found["episode"][row])], int(found["start"][row])
        rows = np.minimum(np.arange(start, start + 9), episode.length - 1)
        video = side_by_side([episode.frames(name, rows) for name in CAMERAS], 16, 16)
        assert video.shape == (9, 3, 16, 32)
        expected = codec.encode(video.transpose(0, 1)[None])[0].half().numpy()
        np.testing.assert_allclose(found["real"][row], expected, atol=2e-3)
        np.testing.assert_array_equal(found["proprio"][row], episode.state[start])
        n = min(8, episode.length - start)
        np.testing.assert_array_equal(found["action"][row, :n], episode.action[start : start + n])
        assert found["action_padded"][row].tolist() == [i >= n for i in range(8)]
        np.testing.assert_array_equal(found["action_max"][row], episode.action.max(0))


def test_cameras_are_chosen_or_asked_for(demos: Path, shared: Path) -> None:
    dataset, three = open_dataset(demos), open_dataset(shared / "data" / "lerobot_v30")
    assert chosen_cameras(dataset) == (FRONT, WRIST)
    assert chosen_cameras(dataset, (WRIST,)) == (WRIST,)
    with pytest.raises(SimForcingError, match=r"has 3 cameras .* say with --cameras"):
        chosen_cameras(three)
    with pytest.raises(SimForcingError, match="did you mean"):
        chosen_cameras(dataset, ("observation.images.rist",))
    with pytest.raises(SimForcingError, match="named twice"):
        chosen_cameras(dataset, (WRIST, WRIST))


# -- training -------------------------------------------------------------------------------------------------------


def test_a_run_writes_its_start_split_log_and_model(trained: Path) -> None:
    described = json.loads((trained / "run.json").read_text())
    assert (described["setting"], described["variant"], described["start"]) == (
        "unconditional",
        "first-frame",
        "scratch",
    )
    assert described["data"]["after_end"] == "still"
    assert load_split(trained / "split.json") == described["split"]
    assert len(described["split"]["train"]) == 3 and len(described["split"]["val"]) == 1
    assert set(json.loads((trained / "start.json").read_text())["new"]) == set(
        Policy.from_pretrained(trained / "model").state_dict()
    )
    steps = [row for row in log(trained) if "total" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["total"] == pytest.approx(row["video"] + row["action"], abs=2e-6) for row in steps)
    last = log(trained)[-1]
    assert last["val_flow"] == pytest.approx(sum(last[f"val_action_{x}"] for x in (0.3, 0.6, 0.9)) / 3, abs=1e-4)
    parts = [last[f"val_action_error_{name}"] for name in ("position", "rotation", "gripper")]
    assert last["val_action_error"] == pytest.approx((3 * parts[0] + 3 * parts[1] + parts[2]) / 7, rel=1e-3)


def test_statistics_are_those_of_the_training_episodes(demos: Path, trained: Path) -> None:
    prepared, dataset = Policy.from_pretrained(trained / "model").preparation, open_dataset(demos)
    assert prepared is not None
    train_rows = np.concatenate([dataset[i].action for i in load_split(trained / "split.json")["train"]])
    np.testing.assert_array_equal(prepared.action_stats.min, train_rows.min(0))
    np.testing.assert_array_equal(prepared.action_stats.max, train_rows.max(0))


@pytest.mark.parametrize(
    ("words", "frozen"),
    [(("action-only",), True), (("action-only", "--variant", "idm"), True), (("video-action",), False)],
)
def test_settings_and_variants(
    demos: Path, latents: Path, tmp_path: Path, words: tuple[str, ...], frozen: bool
) -> None:
    out = tmp_path / "run"
    more = ("--steps", "2", "--lr", "0.01", "--validate-every", "1")
    assert train(demos, out, "--latents", latents, "--setting", *words, *more) == 0
    policy, start = Policy.from_pretrained(out / "model"), json.loads((out / "run.json").read_text())
    fresh = tmp_path / "fresh"
    assert train(demos, fresh, "--latents", latents, "--setting", *words, "--steps", "1", "--lr", "1e-30") == 0
    before = Policy.from_pretrained(fresh / "model").state_dict()
    moved = {name.split(".")[0] for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"action", "proprio"} | (set() if frozen else {"video"})
    assert (
        policy.config.variant
        == start["variant"]
        == (words[-1] if len(words) > 1 else {True: "first-frame", False: "joint"}[frozen])
    )
    assert ("video" in log(out)[0]) is (not frozen)
    assert [row["step"] for row in log(out) if "val_flow" in row] == [1, 2, 2]


def test_a_policy_starts_from_a_world_model_and_says_so(
    demos: Path, latents: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    like = Policy.from_pretrained(trained / "model")
    torch.manual_seed(5)
    prepared = Preparation(**{f.name: getattr(like.preparation, f.name) for f in fields(Preparation)})
    student = WorldModel(WorldModelConfig(NANO.video, NANO.action, channels=like.config.channels), prepared)
    student.save_pretrained(tmp_path / "student")
    out = tmp_path / "run"
    words = ("--latents", latents, "--from", tmp_path / "student", "--steps", "1", "--lr", "1e-30")
    assert train(demos, out, *words) == 0
    said = capsys.readouterr().out
    assert f"policy from student {tmp_path / 'student'}" in said
    assert "the source's sim: 4 tensors left out (a policy sees no simulation)" in said
    assert "proprio: 1 tensor new (the source's states have another width)" in said
    made = Policy.from_pretrained(out / "model")
    assert torch.equal(made.video.proj_out.weight, student.video.proj_out.weight)
    assert json.loads((out / "start.json").read_text())["source"] == "student"
    assert train(demos, tmp_path / "base", *words[:2], "--from", f"base:{tmp_path / 'student'}", "--steps", "1") == 0
    assert "resized from video" in capsys.readouterr().out
    other = train(demos, out, *words[:2], "--from", "none", "--steps", "1", "--lr", "1e-30")
    assert "start: " in refused(capsys, other)
    bundled = train(demos, tmp_path / "x", *words[:2], "--from", "bundled-student", "--steps", "1")
    assert "does not fit the policy" in refused(capsys, bundled)


def test_names_of_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Start.parse("none") == Start("nothing", "")
    assert Start.parse("base:models/wan") == Start("base", "models/wan")
    assert Start.parse("runs/a/model") == Start(None, "runs/a/model")
    assert Start.parse("bundled").kind == Start.parse("bundled-teacher").kind == "teacher"
    assert Start.parse("bundled-student").open()[0] == "student"
    with pytest.raises(SimForcingError, match="--from base:DIR"):
        Start.parse("base")


def test_a_killed_run_goes_on_to_the_same_end(demos: Path, latents: Path, trained: Path, tmp_path: Path) -> None:
    """Stopped after its second step as by SIGTERM, then started again."""
    out = tmp_path / "run"

    def stopping(*args: object, **kwargs: object) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "memory_gib", stopping)  # asked for when the first step has ended
        with pytest.raises(SystemExit):
            train(demos, out, "--latents", latents)
    assert not (out / "model").exists()
    assert log(out)[-1]["step"] == 2
    assert train(demos, out, "--latents", latents) == 0
    ours, theirs = (load_file(place / "model" / "model.safetensors") for place in (out, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrapped_for_several_processes_it_is_trained_and_validated_the_same(
    demos: Path, latents: Path, trained: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "run"
    assert train(demos, out, "--latents", latents, "--parallel", kind) == 0
    ours, theirs = log(out)[-1], log(trained)[-1]
    assert ours | {"seconds": 0} == pytest.approx(theirs | {"seconds": 0}, abs=1e-4)
    weights, plain = (load_file(place / "model" / "model.safetensors") for place in (out, trained))
    assert all(torch.allclose(weights[name], plain[name], atol=1e-5) for name in plain)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    cases = {
        ("--setting", "unconditional", "--variant", "joint"): "trains policies of variant first-frame",
        ("--val", "4"): "leave none to train on",
        ("--val", "0"): "no episodes in part 'val'",
        ("--encode-only",): "--encode-only needs --latents",
        ("--cameras", "observation.images.sid"): "no camera 'observation.images.sid'",
        ("--set", "objective.video_wait=1"): "did you mean 'video_weight'?",
        ("--recipe", "policy-tyni"): "did you mean 'policy-tiny'?",
        ("--from", "teacher:/no/such/dir"): "no model at /no/such/dir",
    }
    for words, message in cases.items():
        assert message in refused(capsys, train(demos, out, *words))
    assert not out.exists()


@pytest.mark.parametrize(
    "recipe", [policy_recipe("policy-tiny"), RECIPES["libero-tiny"]], ids=["policy", "world model"]
)
def test_the_longest_instructions_of_libero_fit(recipe: PolicyRecipe | Recipe) -> None:
    words = Words(recipe.text, recipe.text_length)
    tasks = [
        "pick up the black bowl between the plate and the ramekin and place it on the plate",
        "pick up the black bowl in the top drawer of the wooden cabinet and place it on the plate",
        "put the white mug on the left plate and put the yellow and white mug on the right plate",
    ]
    embedded = [words.embed(part) for part in words.parts(tasks)]  # refuses what is longer than the recipe's text
    assert embedded and all(array.size for arrays in embedded for array in arrays.values())


def test_other_latents_are_refused(
    demos: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "left_to_right" in refused(capsys, train(demos, tmp_path / "run", "--latents", latents, "--cameras", WRIST))


def test_the_policy_recipes(tmp_path: Path) -> None:
    libero = POLICIES["policy-libero"]
    assert (libero.rule_of(2), libero.rule.actions) == (ClipRule(frames=9, stride=4, height=224, width=448), 32)
    assert (libero.video.dim, libero.video.num_layers, libero.action.dim) == (3072, 30, 1024)
    run_ = libero.training
    assert (run_.batch_size, run_.epochs, run_.lr, run_.warmup, run_.final_lr) == (16, 10, 1e-4, 0.05, 0.01)
    assert (run_.betas, run_.weight_decay, run_.clip, libero.window_every) == ((0.9, 0.95), 0.01, 1.0, 1)
    assert (libero.text_length, libero.text_padding, libero.after_end) == (128, "zeros", "still")
    with pytest.raises(SimForcingError, match="give --codec"):
        policy_recipe("policy-libero")


# -- acting ---------------------------------------------------------------------------------------------------------


def seen(batch: int = 2) -> dict[str, np.ndarray]:
    return {name: pictures(i, batch, size) for i, (name, size) in enumerate(CAMERAS.items())}


def test_a_saved_policy_acts_in_the_units_of_the_recordings(trained: Path, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(trained / "model")
    images, state, words = seen(), numbers(0, 2, STATE), ["task 0", "something else"]
    found = policy.act(images, state, words, seed=3)
    assert found.shape == (2, 8, ACTION) and found.dtype == np.float32
    alone = policy.act({name: view[1:] for name, view in images.items()}, state[1:], words[1:], seed=3)
    np.testing.assert_allclose(found[1:], alone, atol=1e-5)
    assert np.abs(found - policy.act(images, state, words, seed=[3, 4])).max(axis=(1, 2)).astype(bool).tolist() == [
        False,
        True,
    ]
    policy.save_pretrained(tmp_path / "copy")
    again = Policy.from_pretrained(tmp_path / "copy")
    assert again.preparation == replace(again.preparation) and again.preparation.cameras == CAMERAS  # type: ignore[union-attr]
    np.testing.assert_array_equal(again.act(images, state, words, seed=3), found)
    for name in CAMERAS:  # each camera is looked at
        other = images | {name: 255 - images[name]}
        assert np.abs(policy.act(other, state, words, seed=3) - found).max() > 1e-6


def test_what_a_policy_cannot_look_at_is_named(trained: Path) -> None:
    policy, state, words = Policy.from_pretrained(trained / "model"), numbers(0, 2, STATE), ["a", "b"]
    good = seen()
    bad = state.copy()
    bad[1, 2] = np.nan
    cases: list[tuple[dict[str, np.ndarray], np.ndarray, list[str], str]] = [
        ({FRONT: good[FRONT]}, state, words, "this policy looks at"),
        (good | {"observation.images.rist": good[WRIST]}, state, words, "did you mean 'observation.images.wrist'"),
        (good | {WRIST: good[WRIST].astype(np.float32)}, state, words, "must be uint8"),
        (good | {WRIST: good[WRIST].transpose(0, 3, 1, 2)}, state, words, "RGB with the top row first"),
        (good | {WRIST: good[WRIST][:, :16]}, state, words, "shape of the recorded 32 x 32"),
        (good | {WRIST: good[WRIST][:1]}, state, words, "1 pictures, the first camera has 2"),
        (good, state[:, :7], words, r"state has shape \[2, 7\], it must be \[2, 8\]"),
        (good, bad, words, "NaN"),
        (good, state, ["a"], "1 instructions for 2 pictures"),
        (good, state, [], "no observation"),
    ]
    for images, numbers_, instruction, message in cases:
        with pytest.raises(InputError, match=message):
            policy.act(images, numbers_, instruction)
    with pytest.raises(InputError, match="1 seeds for 2"):
        policy.act(good, state, words, seed=[1])


def test_a_policy_without_cameras_says_so() -> None:
    stats = Normalizer.fit(numbers(0, 5, ACTION))
    prepared = PolicyPreparation(stats, stats, rule=NANO.rule)
    blind = Policy(config_of(NANO, prepared, 40, "first-frame"), prepared)
    with pytest.raises(SimForcingError, match="does not say which cameras"):
        blind.act(seen(), numbers(0, 2, ACTION), ["a", "b"])


# -- the real thing -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_while_it_trains_on_the_bundled_world_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    from simforcing.twin.playground import write_pairs

    write_pairs(tmp_path / "pairs", range(4), workers=1)
    words = ["policy", "train", str(tmp_path / "pairs"), "--latents", str(tmp_path / "latents"), "--threads", "1"]
    words += ["--device", "cpu", "--steps", "6", "--batch-size", "4", "--every", "8", "--setting", "video-action"]
    words += ["--set", "training.log_every=1", "training.checkpoint_seconds=0"]
    assert run(*words, "--out", tmp_path / "whole") == 0
    environment = os.environ | {"PYTHONPATH": str(Path(simforcing.__file__).parents[1])}
    command = [sys.executable, "-m", "simforcing.cli.main", *words, "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 3" in line:
            process.kill()
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model").exists()
    assert run(*words, "--out", tmp_path / "killed") == 0
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
