"""Both codecs: what a latent depends on, round trips, and errors."""

import inspect
import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from simforcing.data.windows import resize_crop
from simforcing.errors import InputError, SimForcingError
from simforcing.model import wan_vae
from simforcing.model.codec import (
    Codec,
    TinyCodec,
    TinyCodecConfig,
    WanCodec,
    load_codec,
    to_pixels,
    to_unit,
)

FRAMES, SIDE = 13, 32


def video(seed: int = 0, batch: int = 2, frames: int = FRAMES) -> Tensor:
    return torch.rand(batch, 3, frames, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture(scope="module")
def tiny() -> TinyCodec:
    """All weights random, so that every path takes part."""
    codec = TinyCodec(TinyCodecConfig(channels=4, encoder_widths=(8, 16, 16), decoder_widths=(16, 8, 8)))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in codec.state_dict().values():
            inputs = value[0].numel() if value.ndim > 1 else 1
            value.copy_(torch.randn(value.shape, generator=g) / inputs**0.5)
        codec.scale.fill_(1.7)
    return codec.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def wan() -> WanCodec:
    return wan_codec()


def wan_codec(patch_size: int | None = None) -> WanCodec:
    """A causal VAE of the published architecture, small and random, with published-like constants."""
    from diffusers import AutoencoderKLWan

    sides = {} if patch_size is None else {"patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True}
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.5, -0.25, 0.0, 1.0],
        latents_std=[2.0, 0.5, 1.5, 1.0], **sides,
    )  # fmt: skip
    return WanCodec(vae.eval().requires_grad_(False))


@pytest.fixture(scope="module", params=["tiny", "wan"])
def codec(request: pytest.FixtureRequest) -> Codec:
    found: Codec = request.getfixturevalue(request.param)
    return found


# -- pixels -------------------------------------------------------------------------------------------------------


def test_every_pixel_value_survives_the_unit_range() -> None:
    frames = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(1, 2, 8, 16, 3)
    unit = to_unit(frames)
    assert unit.shape == (1, 3, 2, 8, 16)
    assert (float(unit.min()), float(unit.max())) == (-1, 1)
    assert torch.equal(to_pixels(unit), frames)
    assert torch.equal(unit[0, 1, 1, 2, 3], to_unit(frames[:, 1:, 2:3, 3:4])[0, 1, 0, 0, 0])


def test_pixels_are_clamped_and_rounded_to_the_nearest() -> None:
    values = torch.tensor([-1.7, 1.3, 0.0, 1 - 0.9 / 127.5, 1 - 0.1 / 127.5])
    pixels = to_pixels(values.view(1, 1, 1, 1, 5).expand(1, 3, 1, 1, 5))
    assert pixels[0, 0, 0, :, 0].tolist() == [0, 255, 128, 254, 255]


# -- both codecs ----------------------------------------------------------------------------------------------------


def test_shapes(codec: Codec) -> None:
    assert codec.latent_shape(FRAMES, SIDE, SIDE) == (4, 4, 4, 4)
    latents = codec.encode(video())
    assert latents.shape == (2, 4, 4, 4, 4)
    assert codec.decode(latents).shape == (2, 3, FRAMES, SIDE, SIDE)
    assert codec.encode(video(frames=1)).shape == (2, 4, 1, 4, 4)
    assert codec.latent_shape(1, 8, 24) == (4, 1, 1, 3)


@pytest.mark.parametrize(
    ("frames", "height", "width", "what"),
    [(12, 32, 32, "12 frames"), (0, 32, 32, "0 frames"), (13, 36, 32, "36x32 pixels"), (13, 32, 30, "32x30 pixels")],
)
def test_sizes_that_do_not_fit_are_refused(codec: Codec, frames: int, height: int, width: int, what: str) -> None:
    with pytest.raises(InputError, match=what):
        codec.latent_shape(frames, height, width)
    with pytest.raises(ValueError, match=what):
        codec.encode(torch.zeros(1, 3, frames, height, width))


def test_the_first_frame_is_encoded_alone(codec: Codec) -> None:
    clip = video()
    alone = codec.encode(clip[:, :, :1])
    torch.testing.assert_close(codec.encode(clip)[:, :, :1], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("frame", [0, 1, 4, 5, 12])
def test_a_frame_reaches_its_own_latent_and_none_before(codec: Codec, frame: int) -> None:
    clip = video()
    changed = clip.clone()
    changed[:, :, frame] = -changed[:, :, frame]
    a, b = codec.encode(clip), codec.encode(changed)
    own = (frame + 3) // 4
    assert torch.equal(a[:, :, :own], b[:, :, :own])
    assert float((a[:, :, own] - b[:, :, own]).abs().max()) > 1e-3


@pytest.mark.parametrize("latent", [0, 1, 3])
def test_a_latent_reaches_its_own_frames_and_none_before(codec: Codec, latent: int) -> None:
    z = torch.randn(2, 4, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    changed = z.clone()
    changed[:, :, latent] += 1
    a, b = codec.decode(z), codec.decode(changed)
    first = max(4 * latent - 3, 0)
    assert torch.equal(a[:, :, :first], b[:, :, :first])
    for frame in range(first, 4 * latent + 1):
        assert float((a[:, :, frame] - b[:, :, frame]).abs().max()) > 1e-5, frame


def test_a_clip_does_not_depend_on_its_batch(codec: Codec) -> None:
    clips = video(batch=3)
    together = codec.encode(clips)
    decoded = codec.decode(together)
    for i in range(3):
        torch.testing.assert_close(codec.encode(clips[i : i + 1])[0], together[i], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(codec.decode(together[i : i + 1])[0], decoded[i], atol=1e-5, rtol=1e-4)


# -- the small one --------------------------------------------------------------------------------------------------


def test_what_does_not_move_has_the_same_latent_everywhere(tiny: TinyCodec) -> None:
    still = video()[:, :, :1].expand(-1, -1, FRAMES, -1, -1)
    latents = tiny.encode(still)
    torch.testing.assert_close(latents, latents[:, :, :1].expand_as(latents), atol=1e-5, rtol=0)


def test_an_orthonormal_basis_alone_gives_back_what_it_spans() -> None:
    """A new codec's convolutions add nothing: decode(encode(x)) is then the projection, and shift and scale cancel."""
    codec = TinyCodec(TinyCodecConfig(channels=4, encoder_widths=(8, 8, 8), decoder_widths=(8, 8, 8)))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        codec.basis.copy_(torch.linalg.qr(torch.randn(768, 4, generator=g))[0].T)
        codec.mean.copy_(0.1 * torch.randn(768, generator=g))
        codec.shift.copy_(torch.randn(4, generator=g))
        codec.scale.fill_(3.0)
        latents = torch.randn(2, 4, 4, 4, 4, generator=g)
        # Chunk 0 holds frame 0 only, so its latent is not a free one: it is compared from the first chunk on.
        again = codec.encode(codec.decode(latents))
    torch.testing.assert_close(again[:, :, 1:], latents[:, :, 1:], atol=1e-4, rtol=1e-4)


def test_a_file_gives_back_the_codec(tiny: TinyCodec, tmp_path: Path) -> None:
    path = tmp_path / "codec.safetensors"
    tiny.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["codec.safetensors"]
    loaded = load_codec(path)
    assert isinstance(loaded, TinyCodec)
    assert loaded.config == tiny.config
    assert loaded.identity == tiny.identity
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    torch.testing.assert_close(loaded.encode(video()), tiny.encode(video()), atol=5e-3, rtol=5e-3)
    loaded.save(tmp_path / "again.safetensors")
    again = TinyCodec.load(tmp_path / "again.safetensors")
    assert again.identity == tiny.identity
    latents = loaded.encode(video())
    assert torch.equal(again.encode(video()), latents)
    assert torch.equal(again.decode(latents), loaded.decode(latents))


def test_identity_is_of_the_latents_and_not_of_the_decoder(tiny: TinyCodec, tmp_path: Path) -> None:
    tiny.save(tmp_path / "a.safetensors")
    other = TinyCodec.load(tmp_path / "a.safetensors")
    other.decoder[0].weight.add_(1)
    assert other.identity == tiny.identity
    other.shift.add_(1)
    assert other.identity != tiny.identity
    assert {k: v for k, v in other.identity.items() if k != "fingerprint"} == {
        "codec": "tiny", "channels": 4, "stride": 8, "encoder_widths": [8, 16, 16], "decoder_widths": [16, 8, 8],
    }  # fmt: skip


def test_files_of_something_else_are_refused(tiny: TinyCodec, tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no codec")
    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "keys.safetensors", metadata={"config": '{"channels": 4, "colour": 1}'})
    save_file({"a": torch.zeros(3)}, tmp_path / "state.safetensors", metadata={"config": '{"channels": 4}'})
    save_file({"a": torch.zeros(3)}, tmp_path / "json.safetensors", metadata={"config": "{"})
    tiny.save(tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(whole[: len(whole) // 2])
    for name in ("text", "other", "keys", "state", "json", "short"):
        with pytest.raises(SimForcingError, match=rf"{name}\.safetensors is not a codec") as error:
            load_codec(tmp_path / f"{name}.safetensors")
        assert "\n" not in str(error.value)


def test_a_place_without_a_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="no codec at nowhere"):
        load_codec("nowhere")
    with pytest.raises(SimForcingError, match="holds no AutoencoderKLWan"):
        load_codec(tmp_path)


# -- Wan's ----------------------------------------------------------------------------------------------------------


def test_wan_latents_are_the_normalised_mean_of_the_posterior(wan: WanCodec) -> None:
    posterior = wan.vae.encode(video()).latent_dist
    mean, std = (torch.tensor(v).view(1, 4, 1, 1, 1) for v in ([0.5, -0.25, 0.0, 1.0], [2.0, 0.5, 1.5, 1.0]))
    latents = wan.encode(video())
    assert torch.equal(latents, (posterior.mean - mean) / std)
    assert torch.equal(latents, wan.encode(video()))
    torch.testing.assert_close(wan.decode(latents), wan.vae.decode(posterior.mean).sample, atol=1e-5, rtol=1e-4)


def test_wan_with_patches_has_twice_the_stride() -> None:
    codec = wan_codec(patch_size=2)
    assert (codec.channels, codec.spatial_stride) == (4, 16)
    latents = codec.encode(video(batch=1, frames=5))
    assert latents.shape == (1, *codec.latent_shape(5, SIDE, SIDE)) == (1, 4, 2, 2, 2)
    assert codec.decode(latents).shape == (1, 3, 5, SIDE, SIDE)
    with pytest.raises(SimForcingError, match="multiples of 16"):
        codec.latent_shape(5, 24, 32)


def test_wan_directory_is_loaded(wan: WanCodec, tmp_path: Path) -> None:
    wan.vae.save_pretrained(tmp_path / "vae")
    loaded = load_codec(tmp_path / "vae")
    assert isinstance(loaded, WanCodec)
    assert {k: v for k, v in loaded.identity.items() if k != "fingerprint"} == {
        "codec": "wan", "channels": 4, "stride": 8,
    }  # fmt: skip
    assert loaded.identity == wan.identity
    assert torch.equal(loaded.encode(video(batch=1)), wan.encode(video(batch=1)))
    assert not any(p.requires_grad for p in loaded.parameters())


def test_wan_identity_is_of_the_latents_and_neither_of_names_nor_of_the_decoder(wan: WanCodec, tmp_path: Path) -> None:
    wan.vae.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "other-name")
    file = tmp_path / "other-name" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    assert load_codec(tmp_path / "other-name").identity == wan.identity
    save_file(state | {"decoder.conv_in.bias": state["decoder.conv_in.bias"] + 1}, file)
    assert load_codec(tmp_path / "other-name").identity == wan.identity
    for name in ("encoder.conv_in.bias", "quant_conv.weight"):
        save_file(state | {name: state[name] + 1e-3}, file)
        assert load_codec(tmp_path / "other-name").identity != wan.identity
    save_file(state, file)
    config = tmp_path / "other-name" / "config.json"
    config.write_text(config.read_text().replace("-0.25", "-0.26"))
    assert load_codec(tmp_path / "other-name").identity != wan.identity


def test_half_weights_are_computed_in_float32(wan: WanCodec, tmp_path: Path) -> None:
    wan.vae.save_pretrained(tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file)
    loaded = load_codec(tmp_path / "vae")
    assert loaded.encode(video(batch=1)).dtype == torch.float32
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.identity != wan.identity


def wan22(**sizes: Any) -> Any:
    """Wan2.2's structure (residual stages, patches of 2, 48 latent channels) at a fraction of its width."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    chosen = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]} | sizes
    return AutoencoderKLWan(
        base_dim=4, decoder_base_dim=8, z_dim=48, is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        latents_mean=list(wan_vae.LATENTS_MEAN), latents_std=list(wan_vae.LATENTS_STD), scale_factor_temporal=4,
        scale_factor_spatial=16, **chosen,
    ).eval()  # fmt: skip


def original_vae(vae: Any, path: Path, change: Callable[[dict[str, Tensor]], object] = lambda state: None) -> Path:
    state = {wan_vae.original_name(k, vae.config.num_res_blocks): v for k, v in vae.state_dict().items()}
    change(state)
    torch.save(state, path)
    return path


def original_vae_names() -> set[str]:
    """The names in Wan2.2_VAE.pth, spelled out from its structure: four stages, the last without a resampler."""

    def residual(at: str, shortcut: bool) -> set[str]:
        names = {f"{at}.residual.{i}.gamma" for i in (0, 3)}
        layers = [f"{at}.residual.{i}" for i in (2, 6)] + ([f"{at}.shortcut"] if shortcut else [])
        return names | {f"{layer}.{end}" for layer in layers for end in ("weight", "bias")}

    names: set[str] = set()
    for half, way, count, widens, in_time in (
        ("encoder", "down", 2, {1, 2}, {1, 2}), ("decoder", "up", 3, {2, 3}, {0, 1}),
    ):  # fmt: skip
        for stage in range(4):
            inside = f"{half}.{way}samples.{stage}.{way}samples"
            for j in range(count):
                names |= residual(f"{inside}.{j}", j == 0 and stage in widens)
            layers = (["resample.1"] if stage < 3 else []) + (["time_conv"] if stage in in_time else [])
            names |= {f"{inside}.{count}.{layer}.{end}" for layer in layers for end in ("weight", "bias")}
        names |= residual(f"{half}.middle.0", False) | residual(f"{half}.middle.2", False)
        names |= {f"{half}.middle.1.norm.gamma", f"{half}.head.0.gamma"}
        layers = [f"{half}.{x}" for x in ("middle.1.to_qkv", "middle.1.proj", "conv1", "head.2")]
        names |= {f"{layer}.{end}" for layer in layers for end in ("weight", "bias")}
    return names | {f"conv{i}.{end}" for i in (1, 2) for end in ("weight", "bias")}


def test_original_names_cover_the_vae_exactly() -> None:
    names = [wan_vae.original_name(key, 2) for key in wan22().state_dict()]
    assert len(names) == len(set(names)) == 196
    assert set(names) == original_vae_names()


@pytest.mark.parametrize(
    "sizes",
    [{}, {"dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True]}],
    ids=["wan2.2", "shallow"],
)
def test_the_original_file_gives_the_same_codec(tmp_path: Path, sizes: dict[str, Any]) -> None:
    vae = wan22(**sizes)
    loaded = load_codec(original_vae(vae, tmp_path / "vae.pth"))
    assert isinstance(loaded, WanCodec)
    for key in inspect.signature(type(vae).__init__).parameters.keys() - {"self"}:
        assert loaded.vae.config[key] == vae.config[key], key
    assert loaded.identity == WanCodec(vae).identity
    clip = torch.rand(1, 3, 5, SIDE, SIDE)
    assert torch.equal(loaded.vae.encode(clip).latent_dist.mode(), vae.encode(clip).latent_dist.mode())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s.pop("decoder.upsamples.0.upsamples.3.time_conv.bias"),
            r"missing: decoder\.upsamples\.0\.upsamples\.3",
        ),
        (lambda s: s.update({"extra": torch.zeros(1)}), "unexpected: extra"),
        (lambda s: s.update({"conv1.bias": torch.zeros(3)}), r"conv1\.bias \(3,\) instead of \(96,\)"),
        (lambda s: s.pop("encoder.conv1.weight"), r"missing: encoder\.conv1\.weight"),
        (lambda s: s.update({"conv2.weight": torch.zeros(16, 16, 1, 1, 1)}), "has 16 latent channels"),
        (lambda s: [s.pop(k) for k in list(s) if k.startswith("encoder.downsamples")], r"not the VAE of Wan2\.2"),
    ],
)
def test_original_files_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    with pytest.raises(SimForcingError, match=said) as error:
        load_codec(original_vae(wan22(), tmp_path / "vae.pth", change))
    assert "\n" not in str(error.value)


def test_directories_that_do_not_fit_are_refused(wan: WanCodec, tmp_path: Path) -> None:
    wan.vae.save_pretrained(tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    save_file({k: v for k, v in state.items() if k != "quant_conv.bias"}, file)
    with pytest.raises(SimForcingError, match=r"missing: quant_conv\.bias"):
        load_codec(tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config | {"dim_mult": "wide"}))
    with pytest.raises(SimForcingError, match="no AutoencoderKLWan has these sizes"):
        load_codec(tmp_path / "vae")
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config | {"_class_name": "AutoencoderKL"}))
    with pytest.raises(SimForcingError, match="holds no AutoencoderKLWan"):
        load_codec(tmp_path / "vae")


# -- the bundled one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["real", "sim"])
def test_the_bundled_codec_shows_the_bundled_world(view: str) -> None:
    """A rendered episode that no fit has seen, at clip size: more than 24 dB."""
    if not Path(str(files("simforcing") / "assets" / "codec.safetensors")).is_file():
        pytest.skip("this checkout has no bundled codec")
    pytest.importorskip("mujoco")
    from simforcing.twin.playground import episode

    codec, rollout = load_codec(), episode(990_001, real=view == "real")
    frames = rollout.real if view == "real" else rollout.sim
    assert frames is not None
    pixels = torch.from_numpy(resize_crop(frames[:FRAMES], 64, 64))[None]
    shown = to_pixels(codec.decode(codec.encode(to_unit(pixels))))
    error = (shown.float() - pixels.float()).square().mean()
    assert float(10 * torch.log10(255**2 / error)) > 24
    latents = codec.encode(to_unit(pixels))
    assert 0.3 < float(latents.std()) < 3
