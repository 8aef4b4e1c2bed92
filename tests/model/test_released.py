"""The authors' checkpoints: names, sizes from shapes, round trips bit by bit, and everything that is refused."""

import json
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from simforcing.data.stats import Normalizer
from simforcing.errors import SimForcingError
from simforcing.model import released
from simforcing.model.codec import TinyCodec, TinyCodecConfig
from simforcing.model.experts import ExpertConfig
from simforcing.model.importing import (
    BRIDGE_ACTION,
    BRIDGE_RULE,
    PreparationSource,
    import_released,
    read_convention,
    recognise,
)
from simforcing.model.preparation import Preparation
from simforcing.model.text import PROMPTS
from simforcing.model.world_model import WorldModel, WorldModelConfig

EXPERT = ExpertConfig(dim=16, ffn_dim=24, num_layers=2, num_heads=2, head_dim=12, text_dim=8, freq_dim=8)
CONFIG = WorldModelConfig(
    video=EXPERT, action=replace(EXPERT, dim=12, ffn_dim=20), channels=4, action_dim=3, proprio_dim=5
)
Files = Callable[..., Path]


def random_state(config: WorldModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every parameter random, under our names."""
    g = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(value.shape, generator=g).mul(0.1).to(dtype)
        for key, value in WorldModel(config).state_dict().items()
    }


def content(state: Mapping[str, Tensor], **rest: Any) -> dict[str, Any]:
    """What a file of the authors holds, for parameters under our names."""
    flat = {released.released_name(key): value for key, value in state.items()}
    parts: dict[str, Any] = {
        part: {k.removeprefix(f"{part}."): v for k, v in flat.items() if k.startswith(f"{part}.")}
        for part in released.PARTS
    }
    dtype = str(flat["mot.mixtures.video.patch_embedding.weight"].dtype)
    return parts | {"step": 1234, "torch_dtype": dtype} | rest


@pytest.fixture
def saved(tmp_path: Path) -> Files:
    """Saves a checkpoint of `config`."""

    def save(config: WorldModelConfig = CONFIG, dtype: torch.dtype = torch.bfloat16, **rest: Any) -> Path:
        path = tmp_path / "checkpoint.pt"
        torch.save(content(random_state(config, dtype), **rest), path)
        return path

    return save


def imported(path: Path, out: Path, heads: int | None = 2, **rest: Any) -> released.Released:
    return import_released(recognise(path), path, out, heads=heads, **rest)


# -- names ----------------------------------------------------------------------------------------------------------


def test_names_are_one_to_one_with_the_reference(parity: Path) -> None:
    with safe_open(parity / "forward.safetensors", "pt") as file:
        keys = [key for key in file.keys() if key.startswith(("mot.", "proprio_encoder."))]
    ours = [released.our_name(key) for key in keys]
    assert len(set(ours)) == len(keys) > 100
    assert [released.released_name(name) for name in ours] == keys


def test_names_of_both_experts() -> None:
    pairs = {
        "mot.mixtures.video.blocks.1.self_attn.o.bias": "video.blocks.1.attn1.to_out.0.bias",
        "mot.mixtures.video.blocks.1.sim_cond_conv.weight": "sim.blocks.1.weight",
        "mot.mixtures.video.head.modulation": "video.scale_shift_table",
        "mot.mixtures.video.head.head.bias": "video.proj_out.bias",
        "mot.mixtures.action.blocks.0.modulation": "action.blocks.0.scale_shift_table",
        "mot.mixtures.action.blocks.0.norm3.bias": "action.blocks.0.norm2.bias",
        "mot.mixtures.action.head.weight": "action.head.weight",
        "mot.mixtures.action.time_projection.1.weight": "action.condition_embedder.time_proj.weight",
        "proprio_encoder.weight": "proprio.weight",
    }
    for theirs, ours in pairs.items():
        assert released.our_name(theirs) == ours and released.released_name(ours) == theirs


# -- import -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_an_imported_model_computes_the_reference(parity: Path, tmp_path: Path, which: str) -> None:
    """The student's own outputs; a teacher is the same file without the projections of simulation latents."""
    with safe_open(parity / "forward.safetensors", "pt") as file:
        t = {key: file.get_tensor(key) for key in file.keys()}
        heads = json.loads(file.metadata()["config"])["video"]["num_heads"]
    parts = {
        part: {k.removeprefix(f"{part}."): v for k, v in t.items() if k.startswith(f"{part}.")}
        for part in released.PARTS
    }
    if which == "teacher":
        parts["mot"] = {k: v for k, v in parts["mot"].items() if "sim_cond_conv" not in k}
    path, out = tmp_path / "a.pt", tmp_path / "model"
    torch.save({**parts, "step": 5, "torch_dtype": "torch.float32"}, path)
    assert imported(path, out, heads).role == which

    model = WorldModel.from_pretrained(out).eval()
    context, mask = model.context(t["in.context"], t["in.context_mask"].bool(), t["in.proprio"])
    arguments = (t["in.latents"], t["in.timestep"], t["in.action"], context, mask)
    with torch.no_grad():
        torch.testing.assert_close(model.velocity(*arguments), t["out.a_action"], atol=2e-5, rtol=1e-4)
        if which == "student":
            v = model.velocity(*arguments, sim_latents=t["in.sim_latents"], sim_gate=t["in.c_gate"])
            torch.testing.assert_close(v, t["out.c_gate"], atol=2e-5, rtol=1e-4)
    assert (model.sim is None) == (which == "teacher") and model.config.action_positions == "index"


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_import_then_export_is_bit_by_bit(saved: Files, tmp_path: Path, role: str, dtype: torch.dtype) -> None:
    config = replace(CONFIG, sim_condition=role == "student")
    path = saved(config, dtype, optimizer={"state": {0: torch.ones(2)}})
    found = imported(path, tmp_path / "model")
    assert found.config == config
    assert found.left_out == ("optimizer",)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {dtype}

    released.export_released(tmp_path / "model", tmp_path / "back.pt")
    before, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "back.pt"))
    assert set(after) == {"mot", "proprio_encoder", "step", "torch_dtype"}
    assert (after["step"], after["torch_dtype"]) == (1234, str(dtype))
    for part in released.PARTS:
        assert set(before[part]) == set(after[part])
        for key, value in before[part].items():
            assert after[part][key].dtype == value.dtype and torch.equal(after[part][key], value), key
    assert (tmp_path / "back.pt").stat().st_size < 1.2 * path.stat().st_size


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    state = random_state(CONFIG, torch.bfloat16)
    state["proprio.weight"] = state["proprio.weight"].float() + 1e-6
    torch.save(content(state), tmp_path / "mixed.pt")
    imported(tmp_path / "mixed.pt", tmp_path / "model")
    released.export_released(tmp_path / "model", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert torch.equal(back["proprio_encoder"]["weight"], state["proprio.weight"])
    assert back["mot"]["mixtures.action.head.bias"].dtype == torch.bfloat16


def test_an_old_file_without_zip_is_read(saved: Files, tmp_path: Path) -> None:
    kept = torch.load(saved(), weights_only=True)
    torch.save(kept, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert imported(tmp_path / "old.pt", tmp_path / "model").step == 1234


def test_a_file_without_step_is_read_as_step_0(tmp_path: Path) -> None:
    kept = content(random_state(CONFIG, torch.bfloat16))
    del kept["step"], kept["torch_dtype"]
    torch.save(kept, tmp_path / "a.pt")
    found = imported(tmp_path / "a.pt", tmp_path / "model")
    assert (found.step, found.torch_dtype) == (0, "torch.bfloat16")


# -- what is refused ---------------------------------------------------------------------------------------------------


def broken(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    kept = torch.load(path, weights_only=True)
    change(kept)
    torch.save(kept, path)
    return path


def test_all_tensors_that_do_not_fit_are_listed(saved: Files, tmp_path: Path) -> None:
    def change(kept: dict[str, Any]) -> None:
        mot = kept["mot"]
        del mot["mixtures.video.blocks.1.ffn.2.bias"], mot["mixtures.action.head.weight"]
        mot["mixtures.video.blocks.0.extra"] = torch.zeros(1)
        mot["mixtures.video.blocks.1.norm3.weight"] = torch.zeros(7)
        mot["mixtures.action.blocks.0.norm3.weight"] = torch.zeros(12, dtype=torch.int8)

    with pytest.raises(SimForcingError) as error:
        imported(broken(saved(), change), tmp_path / "model")
    said = str(error.value)
    assert "missing: mot.mixtures.action.head.weight, mot.mixtures.video.blocks.1.ffn.2.bias;" in said
    assert "unexpected: mot.mixtures.video.blocks.0.extra;" in said
    assert "wrong shape: mot.mixtures.video.blocks.1.norm3.weight (7,) instead of (16,)" in said
    assert "not floating: mot.mixtures.action.blocks.0.norm3.weight torch.int8" in said
    assert "\n" not in said and not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k: k.pop("proprio_encoder"), "'proprio_encoder' should hold named tensors, but is a NoneType"),
        (lambda k: k["proprio_encoder"].pop("weight"), "missing: proprio_encoder.weight"),
        (lambda k: k["mot"].pop("mixtures.video.patch_embedding.weight"), "missing: mot.mixtures.video.patch_emb"),
        (lambda k: k["mot"].update({"mixtures.action.action_encoder.weight": torch.zeros(4)}), "is not 2-dimensional"),
        (lambda k: k["mot"].update({"note": "x"}), "'mot' should hold named tensors"),
        (lambda k: k.update(ema={"a": [torch.zeros(1)]}), "unexpected: tensors under ema"),
        (lambda k: k.update(step="last"), "step is 'last'"),
        (lambda k: k["proprio_encoder"]["bias"].fill_(float("nan")), "NaN or infinite weights: proprio.bias"),
        (lambda k: [k["mot"].pop(key) for key in list(k["mot"]) if "action.blocks.1" in key], "layers"),
        (lambda k: [k["mot"].pop(key) for key in list(k["mot"]) if "video.blocks.0" in key], "missing: mot"),
    ],
)
def test_files_that_are_wrong_are_refused(
    saved: Files, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    with pytest.raises(SimForcingError, match=said) as error:
        imported(broken(saved(), change), tmp_path / "model")
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize(
    ("heads", "said"), [(None, "give --heads"), (5, "into 5 heads"), (8, "even width"), (0, "0 heads")]
)
def test_a_head_split_that_shapes_do_not_tell_is_asked_for(
    saved: Files, tmp_path: Path, heads: int | None, said: str
) -> None:
    with pytest.raises(SimForcingError, match=said):
        imported(saved(), tmp_path / "model", heads)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"mot": Evil()}, tmp_path / "zip.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"mot": Evil()}, protocol=2))
    for name in ("zip.pt", "bare.pt"):
        with pytest.raises(SimForcingError, match=r"holds code or objects \(posix.system\)") as error:
            recognise(tmp_path / name)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "pwned").exists()


def test_damaged_files_are_refused(saved: Files, tmp_path: Path) -> None:
    whole = saved().read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    cases = {"short": whole[: len(whole) // 2], "stub": whole[:30], "flipped": bytes(flipped), "tail": whole[:-10]}
    for name, data in cases.items():
        (tmp_path / f"{name}.pt").write_bytes(data)
        with pytest.raises(SimForcingError, match=rf"{name}\.pt .*damaged") as error:
            recognise(tmp_path / f"{name}.pt")
        assert "\n" not in str(error.value)


def test_files_of_something_else_are_refused_by_what_they_hold(tmp_path: Path) -> None:
    values = {
        "a list": [torch.zeros(1)],
        "a mapping with a, b, no 'mot'": {"a": 1, "b": 2},
        "a mapping with nothing": {},
        "import a Wan2.2 directory with --action-backbone": {"backbone_state_dict": {}, "meta": {}},
        "a text encoder": dict.fromkeys(["token_embedding.weight", "blocks.0.pos_embedding.x"], torch.zeros(2)),
        "the VAE of Wan2.2": {"encoder.downsamples.0.downsamples.0.residual.0.gamma": torch.zeros(1)},
    }
    for said, value in values.items():
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(SimForcingError, match="not a checkpoint of the authors") as error:
            recognise(tmp_path / "a.pt")
        assert said in str(error.value)
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").touch()
    for name in ("text.pt", "empty.pt"):
        with pytest.raises(SimForcingError, match=r"is not a file of torch\.save"):
            recognise(tmp_path / name)
    with pytest.raises(SimForcingError, match="no such file or directory"):
        recognise(tmp_path / "nothing.pt")
    with pytest.raises(SimForcingError, match=r"no Wan2\.2 release"):
        recognise(tmp_path)


def test_our_own_directory_needs_no_import(saved: Files, tmp_path: Path) -> None:
    imported(saved(), tmp_path / "model")
    with pytest.raises(SimForcingError, match="is a model directory of this package already"):
        recognise(tmp_path / "model")


def test_an_existing_target_is_refused(saved: Files, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = saved()
    with pytest.raises(SimForcingError, match="model exists"):
        imported(path, tmp_path / "model")


# -- preparation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> PreparationSource:
    """Statistics as the authors write them, a codec of 4 channels, embeddings of width 8."""
    entry = {"min": [-1.0, 0.0, 0.0], "max": [1.0, 2.0, 0.0], "q01": [0] * 3, "mean": [0] * 3, "std": [1] * 3}
    state = {"min": [0.0] * 5, "max": [1.0] * 5}
    stats = {"action": {"default": entry}, "state": {"default": state}, "num_episodes": 3, "num_transition": 9}
    (tmp_path / "dataset_stats.json").write_text(json.dumps(stats))
    TinyCodec(TinyCodecConfig(channels=4, encoder_widths=(8,) * 3, decoder_widths=(8,) * 3)).save(
        tmp_path / "c.safetensors"
    )
    (tmp_path / "text").mkdir()
    for template in PROMPTS.values():
        from simforcing.model.umt5 import cache_path

        embedding = {"context": torch.randn(128, 8).bfloat16(), "mask": torch.arange(128) < 11}
        torch.save(embedding, cache_path(tmp_path / "text", template.format(task="stack"), 128))
    return PreparationSource(tmp_path / "dataset_stats.json", str(tmp_path / "c.safetensors"), str(tmp_path / "text"))


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_the_preparation_is_the_released_one(
    saved: Files, tmp_path: Path, source: PreparationSource, role: str
) -> None:
    imported(saved(replace(CONFIG, sim_condition=role == "student")), tmp_path / "model", source=source)
    found = WorldModel.from_pretrained(tmp_path / "model").preparation
    assert found is not None
    assert (found.rule, found.action, found.text_length) == (BRIDGE_RULE, BRIDGE_ACTION, 128)
    assert found.action_stats.max.tolist() == [1, 2, 0] and found.state_stats.min.tolist() == [0] * 5
    assert found.load_codec().identity == found.codec_identity
    templates = [found.prompts[domain] for domain in ("sim", "real")]
    assert templates == ([PROMPTS["default"]] * 2 if role == "student" else [PROMPTS["sim"], PROMPTS["real"]])
    context, mask = found.context(["stack"], "sim")
    assert context.shape == (1, 128, 8) and bool(mask.all()), "padding is attended to"
    assert bool((context[0, 11:] == 0).all()) and bool((context[0, :11] != 0).any(1).all())
    with pytest.raises(SimForcingError, match="has no embedding in"):
        found.context(["unknown"], "sim")


def test_paths_in_a_model_do_not_depend_on_where_it_is_used(
    saved: Files, tmp_path: Path, source: PreparationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved()
    monkeypatch.chdir(tmp_path)
    imported(path, tmp_path / "model", source=replace(source, codec="c.safetensors", text="text"))
    monkeypatch.chdir("/")
    found = WorldModel.from_pretrained(tmp_path / "model").preparation
    assert found is not None and found.context(["stack"], "real")[0].shape == (1, 128, 8)
    found.load_codec()


def test_parts_of_another_width_are_refused(saved: Files, tmp_path: Path, source: PreparationSource) -> None:
    path = saved(replace(CONFIG, channels=6, action_dim=2))
    with pytest.raises(SimForcingError, match=r"channels 4, the model's 6; .*numbers of an action 3, the model's 2"):
        imported(path, tmp_path / "model", source=source)
    other = replace(source.rule, height=226)
    with pytest.raises(SimForcingError, match="226x320 pixels"):
        imported(path, tmp_path / "model", source=replace(source, rule=other))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"action": {}}', '{"action": {"default": {"min": [1]}}, "state": {}}', '{"action": 3}']
)
def test_statistics_of_another_form_are_refused(
    saved: Files, tmp_path: Path, source: PreparationSource, text: str
) -> None:
    path = saved()
    source.stats.write_text(text)
    with pytest.raises(SimForcingError, match=r"dataset_stats\.json|expected kind min_max"):
        imported(path, tmp_path / "model", source=source)


def test_a_convention_is_read_from_its_json_or_a_datasets(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(BRIDGE_ACTION.to_dict()))
    assert read_convention(file) == BRIDGE_ACTION
    file.write_text(json.dumps({"robot": "x", "action": BRIDGE_ACTION.to_dict() | {"hz": 30}}))
    assert read_convention(file) == replace(BRIDGE_ACTION, hz=30.0)
    file.write_text('{"action": "deltas"}')
    with pytest.raises(SimForcingError, match="'action' is not an object"):
        read_convention(file)


# -- export -----------------------------------------------------------------------------------------------------------


def test_export_converts_when_asked(saved: Files, tmp_path: Path) -> None:
    imported(saved(dtype=torch.float32), tmp_path / "model")
    released.export_released(tmp_path / "model", tmp_path / "half.pt", "bfloat16", step=9)
    half = torch.load(tmp_path / "half.pt", weights_only=True)
    assert (half["step"], half["torch_dtype"]) == (9, "torch.bfloat16")
    want = random_state(CONFIG)["video.proj_out.weight"].bfloat16()
    assert torch.equal(half["mot"]["mixtures.video.head.head.weight"], want)
    with pytest.raises(SimForcingError, match=r"half\.pt exists"):
        released.export_released(tmp_path / "model", tmp_path / "half.pt")
    with pytest.raises(SimForcingError, match="dtype 'int8': there are float32"):
        released.export_released(tmp_path / "model", tmp_path / "other.pt", "int8")


def test_a_model_of_ours_is_exported_as_step_0(tmp_path: Path) -> None:
    WorldModel(CONFIG).save_pretrained(tmp_path / "model")
    released.export_released(tmp_path / "model", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (found["step"], found["torch_dtype"]) == (0, "torch.float32")
    assert imported(tmp_path / "a.pt", tmp_path / "again").config == CONFIG


def preparation(**choices: Any) -> Preparation:
    numbers = Normalizer(np.zeros(3, np.float32), np.ones(3, np.float32))
    return Preparation(numbers, Normalizer(np.zeros(5, np.float32), np.ones(5, np.float32)), **choices)


@pytest.mark.parametrize(
    ("config", "prepared", "said"),
    [
        (replace(CONFIG, action_positions="frame"), None, "action_positions is 'frame'"),
        (replace(CONFIG, attention="bidirectional"), None, "attention is bidirectional"),
        (replace(CONFIG, flow=replace(CONFIG.flow, shift=3.0)), None, r"flow is Flow\(shift=3\.0"),
        (replace(CONFIG, video=replace(EXPERT, eps=1e-5)), None, "eps is 1e-05 and 1e-06"),
        (CONFIG, preparation(text_pooling="mean"), "text_pooling is 'mean'"),
        (CONFIG, preparation(text_pooling="tokens", text_padding="masked"), "text_padding is 'masked'"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(
    tmp_path: Path, config: WorldModelConfig, prepared: Preparation | None, said: str
) -> None:
    WorldModel(config, prepared).save_pretrained(tmp_path / "model")
    with pytest.raises(SimForcingError, match=f"cannot be written in the authors' layout: .*{said}"):
        released.export_released(tmp_path / "model", tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_a_directory_that_does_not_fit_its_config_is_not_exported(saved: Files, tmp_path: Path) -> None:
    imported(saved(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["model"]["action"]["ffn_dim"] = 19
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SimForcingError, match=r"wrong shape: action\.blocks\.0\.ffn"):
        released.export_released(tmp_path / "model", tmp_path / "a.pt")
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(SimForcingError, match="does not describe a world model"):
        released.export_released(tmp_path / "model", tmp_path / "a.pt")
