"""Both codecs: what a latent depends on, round trips, and errors."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from simforcing.data.windows import resize_crop
from simforcing.errors import SimForcingError
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
    return WanCodec(vae.eval().requires_grad_(False), "random")


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
    with pytest.raises(SimForcingError, match=what):
        codec.latent_shape(frames, height, width)
    with pytest.raises(SimForcingError, match=what):
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
    assert loaded.identity == {"codec": "wan", "source": "vae", "channels": 4, "stride": 8}
    assert torch.equal(loaded.encode(video(batch=1)), wan.encode(video(batch=1)))
    assert not any(p.requires_grad for p in loaded.parameters())


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
