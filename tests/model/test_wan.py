"""Wan2.2 releases in both layouts: names, sizes, shards, the action expert's first weights, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.model import backbone, umt5, wan
from simforcing.model.codec import load_codec
from simforcing.model.importing import ActionSizes, import_wan, recognise, wan_state
from simforcing.model.text import TextEncoder
from simforcing.model.wan_vae import LATENTS_MEAN, LATENTS_STD
from simforcing.model.wan_vae import original_name as vae_name
from simforcing.model.world_model import WorldModel, WorldModelConfig

SIZES = ActionSizes(width=16, ffn=20, action_dim=3, proprio_dim=5)
WAN_CONFIG = {"dim": 24, "num_heads": 2, "ffn_dim": 32, "freq_dim": 8, "num_layers": 2, "in_dim": 48, "out_dim": 48}
WAN_CONFIG |= {"eps": 1e-6, "text_len": 512}
UMT5_CONFIG = {"model_type": "umt5", "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 3}
UMT5_CONFIG |= {"vocab_size": 20, "relative_attention_num_buckets": 8, "feed_forward_proj": "gated-gelu"}
Change = Callable[[dict[str, Tensor]], object]


def transformer() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=48, out_channels=48, text_dim=8, freq_dim=8,
        ffn_dim=32, num_layers=2,
    )  # fmt: skip


def vae() -> AutoencoderKLWan:
    """Wan2.2's structure at a fraction of its width; 48 latent channels, since the constants are of 48."""
    torch.manual_seed(1)
    return AutoencoderKLWan(
        base_dim=4, decoder_base_dim=8, z_dim=48, dim_mult=[1, 2, 2], num_res_blocks=1,
        temperal_downsample=[False, True], is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        latents_mean=list(LATENTS_MEAN), latents_std=list(LATENTS_STD), scale_factor_temporal=2, scale_factor_spatial=8,
    )  # fmt: skip


def text_state() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    wanted = umt5.parameter_shapes(UMT5_CONFIG, "test")
    return {key: torch.randn(shape, generator=g).bfloat16() for key, shape in wanted.items()}


def tokenizer(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "spiece.model").write_bytes(b"pieces")
    (directory / "tokenizer_config.json").write_text("{}")


def diffusers_release(root: Path, shard: str = "10GB") -> Path:
    transformer().save_pretrained(root / "transformer", max_shard_size=shard)
    vae().save_pretrained(root / "vae")
    (root / "text_encoder").mkdir()
    (root / "text_encoder" / "config.json").write_text(json.dumps(UMT5_CONFIG))
    state = text_state()
    save_file(
        state | {"encoder.embed_tokens.weight": state["shared.weight"].clone()},
        root / "text_encoder" / "model.safetensors",
    )
    tokenizer(root / "tokenizer")
    return root


def original_release(root: Path, change: Change = lambda state: None) -> Path:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(WAN_CONFIG))
    state = {wan.original_name(k): v for k, v in transformer().state_dict().items()}
    change(state)
    save_file(state, root / "diffusion_pytorch_model.safetensors")
    torch.save({vae_name(k, 1): v for k, v in vae().state_dict().items()}, root / "Wan2.2_VAE.pth")
    encoder = {umt5.original_name(k): v for k, v in text_state().items()}
    torch.save(encoder, root / "models_t5_umt5-xxl-enc-bf16.pth")
    tokenizer(root / "google" / "umt5-xxl")
    return root


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wan")
    return {"diffusers": diffusers_release(root / "diffusers"), "original": original_release(root / "original")}


def found(root: Path) -> wan.WanTransformer:
    result = recognise(root)
    assert isinstance(result, wan.WanTransformer)
    return result


# -- names ----------------------------------------------------------------------------------------------------------


def test_original_names_cover_diffusers_transformer() -> None:
    """The facts of the original layout, spelled out for one block and everything around the blocks."""
    block = ["modulation", "norm3.weight", "norm3.bias", "ffn.0.weight", "ffn.0.bias", "ffn.2.weight", "ffn.2.bias"]
    for part in ("self_attn", "cross_attn"):
        block += [f"{part}.{x}.{end}" for x in "qkvo" for end in ("weight", "bias")]
        block += [f"{part}.norm_q.weight", f"{part}.norm_k.weight"]
    rest = ["head.modulation"] + [
        f"{name}.{end}"
        for name in (
            "patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2",
            "time_projection.1", "head.head",
        )
        for end in ("weight", "bias")
    ]  # fmt: skip
    ours = list(transformer().state_dict())
    assert sorted(map(wan.original_name, ours)) == sorted(rest + [f"blocks.{i}.{n}" for i in (0, 1) for n in block])
    assert [wan.our_name(wan.original_name(name)) for name in ours] == ours


# -- both layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_an_imported_release_has_all_its_weights(releases: dict[str, Path], tmp_path: Path, layout: str) -> None:
    config, absent = import_wan(found(releases[layout]), tmp_path / "model", SIZES)
    assert absent == [] and not list(tmp_path.glob("*partial*"))
    model = WorldModel.from_pretrained(tmp_path / "model")
    assert model.preparation is None and model.config == config
    for key, value in transformer().state_dict().items():
        assert torch.equal(model.state_dict()[f"video.{key}"], value), key
    assert model.sim is not None and all(int(p.count_nonzero()) == 0 for p in model.sim.parameters())

    codec = load_codec(tmp_path / "model" / "codec")
    clip = torch.rand(1, 3, 5, 32, 32)
    want = (vae().encode(clip).latent_dist.mode() - codec.mean) / codec.std
    torch.testing.assert_close(codec.encode(clip), want, atol=1e-5, rtol=1e-5)

    state = load_file(tmp_path / "model" / "text" / "text_encoder" / "model.safetensors")
    assert state.keys() == text_state().keys()
    assert all(torch.equal(state[key], value) for key, value in text_state().items())
    encoder = TextEncoder.load(f"umt5:{tmp_path}/model/text", 128)
    assert (encoder.width, encoder.length) == (8, 128)
    assert (tmp_path / "model" / "text" / "tokenizer" / "spiece.model").read_bytes() == b"pieces"


def test_both_layouts_give_the_same_model(releases: dict[str, Path]) -> None:
    (a, first), (b, second) = (wan_state(found(releases[name]), SIZES) for name in ("diffusers", "original"))
    assert a == b and first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    codecs = [load_codec(releases["diffusers"] / "vae"), load_codec(releases["original"] / "Wan2.2_VAE.pth")]
    assert codecs[0].identity == codecs[1].identity


def test_shards_are_joined(tmp_path: Path) -> None:
    root = diffusers_release(tmp_path / "wan", shard="40KB")
    assert len(list((root / "transformer").glob("*.safetensors"))) > 1
    _, state = wan_state(found(root), SIZES)
    for key, value in transformer().state_dict().items():
        assert torch.equal(state[f"video.{key}"], value)
    index = next((root / "transformer").glob("*.index.json"))
    index.rename(tmp_path / "index.json")
    assert wan_state(found(root), SIZES)[1].keys() == state.keys(), "the parts are told by their numbers too"
    shutil.move(tmp_path / "index.json", index)
    next((root / "transformer").glob("*-00002-of-*")).unlink()
    with pytest.raises(SimForcingError, match=r"missing: diffusion_pytorch_model-00002-of-"):
        found(root)


def test_a_transformer_directory_alone_is_enough(releases: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(releases["diffusers"] / "transformer", tmp_path / "some-name")
    assert import_wan(found(tmp_path / "some-name"), tmp_path / "model", SIZES)[1] == ["VAE", "text encoder"]
    assert not (tmp_path / "model" / "codec").exists()
    import_wan(found(releases["diffusers"]), tmp_path / "other", SIZES, transformer_only=True)
    assert {p.name for p in (tmp_path / "other").iterdir()} == {"config.json", "model.safetensors"}


def test_weights_keep_their_dtype(releases: dict[str, Path], tmp_path: Path) -> None:
    def halve(state: dict[str, Tensor]) -> None:
        state |= {key: value.bfloat16() for key, value in state.items()}

    import_wan(found(original_release(tmp_path / "wan", halve)), tmp_path / "model", SIZES, transformer_only=True)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("blocks.1.self_attn.q.weight"), "missing: blocks.1.self_attn.q.weight"),
        (lambda s: s.update({"blocks.2.modulation": torch.zeros(1)}), "unexpected: blocks.2.modulation"),
        (lambda s: s.update({"head.head.bias": torch.zeros(7)}), r"head.head.bias \(7,\) instead of \(192,\)"),
        (lambda s: s.update({"img_emb.proj.0.bias": torch.zeros(7)}), "unexpected: img_emb.proj.0.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(tmp_path: Path, change: Change, said: str) -> None:
    root = original_release(tmp_path / "wan", change)
    with pytest.raises(SimForcingError, match=said) as error:
        import_wan(found(root), tmp_path / "model", SIZES)
    assert "\n" not in str(error.value) and not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_layers": 3}, "missing: blocks.2.cross_attn.k.bias"),
        ({"num_heads": 5}, "does not divide into 5 heads"),
        ({"num_heads": None}, "num_heads is None; a positive whole number"),
        ({"dim": 48}, "wrong shape"),
        ({"out_dim": 16}, "48 channels in and 16 out"),
    ],
)
def test_a_config_that_does_not_fit_its_tensors_is_refused(
    releases: dict[str, Path], tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    root = Path(shutil.copytree(releases["original"], tmp_path / "wan"))
    (root / "config.json").write_text(json.dumps(WAN_CONFIG | config))
    with pytest.raises(SimForcingError, match=said):
        import_wan(found(root), tmp_path / "model", SIZES)


def test_damaged_parts_are_refused_and_nothing_is_left(releases: dict[str, Path], tmp_path: Path) -> None:
    for name in ("diffusion_pytorch_model.safetensors", "Wan2.2_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"):
        root = Path(shutil.copytree(releases["original"], tmp_path / f"with-{name}"))
        whole = (root / name).read_bytes()
        (root / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SimForcingError, match=rf"{name} is not a .*, or is damaged"):
            import_wan(found(root), tmp_path / "model", SIZES)
        assert not list(tmp_path.glob("model*"))


def test_parts_are_told_by_what_they_hold(releases: dict[str, Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(releases["original"], tmp_path / "wan"))
    (root / "Wan2.2_VAE.pth").rename(root / "a.pth")
    (root / "models_t5_umt5-xxl-enc-bf16.pth").rename(root / "b.pth")
    torch.save({"step": 3}, root / "notes.pt")
    assert import_wan(found(root), tmp_path / "model", SIZES)[1] == []
    shutil.copy(root / "a.pth", root / "c.pth")
    with pytest.raises(SimForcingError, match=r"a\.pth, c\.pth hold the same part"):
        import_wan(found(root), tmp_path / "other", SIZES)


def test_a_release_without_a_tokeniser_or_with_two_transformers_is_refused(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(releases["diffusers"], tmp_path / "wan"))
    shutil.rmtree(root / "tokenizer")
    with pytest.raises(SimForcingError, match="holds no tokeniser"):
        import_wan(found(root), tmp_path / "model", SIZES)
    (root / "transformer_2").mkdir()
    with pytest.raises(SimForcingError, match="two transformers"):
        recognise(root)


def test_text_weights_that_do_not_fit_are_listed(releases: dict[str, Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(releases["diffusers"], tmp_path / "wan"))
    file = root / "text_encoder" / "model.safetensors"
    state = load_file(file)
    del state["encoder.block.1.layer.1.DenseReluDense.wo.weight"]
    save_file(state | {"decoder.bias": torch.zeros(1)}, file)
    with pytest.raises(SimForcingError, match=r"missing: .*wo\.weight; unexpected: decoder\.bias"):
        import_wan(found(root), tmp_path / "model", SIZES)
    save_file(load_file(file) | {"shared.weight": torch.zeros(20, 8).bfloat16()}, file)
    with pytest.raises(SimForcingError, match="differ, but are one embedding"):
        import_wan(found(root), tmp_path / "model", SIZES)


# -- the action expert's first weights --------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_resize_keeps_constants_and_ends(size: list[int], data: st.DataObject) -> None:
    target = data.draw(st.lists(st.integers(2, 7), min_size=len(size), max_size=len(size)))
    factor = (size[-1] / target[-1]) ** 0.5 if len(size) > 1 else 1
    flat = backbone.resize(torch.full(size, 2.0), target)
    torch.testing.assert_close(flat, torch.full(target, 2.0 * factor))
    source = torch.randn(size)
    result = backbone.resize(source, target)
    corners = tuple([0] * len(size)), tuple([-1] * len(size))
    if min(size) > 1:
        for corner in corners:
            torch.testing.assert_close(result[corner], source[corner] * factor)
    assert torch.equal(backbone.resize(source, size), source)


def test_resize_wants_as_many_dimensions() -> None:
    with pytest.raises(ValueError, match="source has 1 dimensions"):
        backbone.resize(torch.zeros(3), [3, 3])


def test_the_action_expert_starts_as_the_video_expert_resized(releases: dict[str, Path]) -> None:
    config, state = wan_state(found(releases["diffusers"]), SIZES)
    assert (config.action.dim, config.action.ffn_dim, config.action_dim, config.proprio_dim) == (16, 20, 3, 5)
    source = transformer().state_dict()
    for key in (
        "blocks.1.attn1.to_q.weight",
        "blocks.0.ffn.net.2.weight",
        "blocks.0.scale_shift_table",
        "condition_embedder.time_proj.bias",
    ):
        assert torch.equal(state[f"action.{key}"], backbone.resize(source[key], state[f"action.{key}"].shape))
    assert torch.equal(state["action.blocks.0.attn1.norm_q.weight"], source["blocks.0.attn1.norm_q.weight"])
    assert state["action.blocks.0.attn1.to_q.weight"].shape == (24, 16)


def test_new_layers_follow_from_the_seed(releases: dict[str, Path]) -> None:
    before = torch.get_rng_state()
    a, b, c = (wan_state(found(releases["diffusers"]), ActionSizes(16, 20, 3, 5, seed))[1] for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for key in ("proprio.weight", "proprio.bias", "action.action_encoder.weight", "action.head.bias"):
        assert torch.equal(a[key], b[key]) and not torch.equal(a[key], c[key]) and int(a[key].count_nonzero()) > 0


def backbone_file(path: Path, config: WorldModelConfig, change: Change = lambda content: None) -> Path:
    """As the authors write it: the action expert's parameters under original names, and their sizes."""
    sizes = config.action
    wanted = backbone.action_shapes(sizes, config.action_dim)
    g = torch.Generator().manual_seed(3)
    content: dict[str, Any] = {
        "policy": {"mode": "linear"},
        "backbone_state_dict": {wan.original_name(k): torch.randn(s, generator=g) for k, s in wanted.items()},
        "meta": {
            "hidden_dim": sizes.dim, "ffn_dim": sizes.ffn_dim, "num_layers": sizes.num_layers, "eps": 1e-6,
            "num_heads": sizes.num_heads, "attn_head_dim": sizes.head_dim, "text_dim": 8, "freq_dim": 8,
        },
    }  # fmt: skip
    change(content)
    torch.save(content, path)
    return path


def test_the_authors_action_backbone_is_taken_as_it_is(releases: dict[str, Path], tmp_path: Path) -> None:
    config, _ = wan_state(found(releases["original"]), ActionSizes(12, 14, 3, 5))
    file = backbone_file(tmp_path / "action.pt", config)
    other, state = wan_state(found(releases["original"]), ActionSizes(action_dim=3, proprio_dim=5), file)
    assert other == config, "widths are the file's"
    want = torch.load(file, weights_only=True)["backbone_state_dict"]
    assert torch.equal(state["action.blocks.1.attn2.to_out.0.bias"], want["blocks.1.cross_attn.o.bias"])
    import_wan(found(releases["original"]), tmp_path / "model", ActionSizes(action_dim=3), file, True)
    assert WorldModel.from_pretrained(tmp_path / "model").config.action == config.action


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["backbone_state_dict"].pop("blocks.0.modulation"), "missing: blocks.0.modulation"),
        (lambda c: c["backbone_state_dict"].update(head=torch.zeros(1)), "unexpected: head"),
        (lambda c: c["meta"].pop("ffn_dim"), "meta: ffn_dim is None"),
        (lambda c: c["meta"].update(num_heads=4, attn_head_dim=6), "num_heads is 4, not 2; head_dim is 6, not 12"),
        (lambda c: c.update(meta=None), "has 'meta'"),
        (lambda c: c.pop("backbone_state_dict"), "is no action backbone: it holds a mapping with policy, meta"),
    ],
)
def test_action_backbones_that_do_not_fit_are_refused(
    releases: dict[str, Path], tmp_path: Path, change: Change, said: str
) -> None:
    config, _ = wan_state(found(releases["original"]), SIZES)
    file = backbone_file(tmp_path / "action.pt", config, change)
    with pytest.raises(SimForcingError, match=said):
        wan_state(found(releases["original"]), SIZES, file)
