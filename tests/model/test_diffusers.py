"""A bidirectional model without actions is Wan2.2's transformer: diffusers' own forward on the same weights."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from simforcing.model.experts import ExpertConfig
from simforcing.model.world_model import WorldModel, WorldModelConfig

Pair = tuple[WorldModel, WanTransformer3DModel]


def wan(heads: int, head_dim: int) -> WanTransformer3DModel:
    """Small, in the arrangement of Wan2.2-TI2V-5B; modulations far from zero, so that time matters."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=head_dim, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=64, num_layers=3, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        eps=1e-6, rope_max_seq_len=64,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "scale_shift_table" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


@pytest.fixture(params=[(4, 24), (2, 12), (3, 20)], ids=lambda p: f"{p[0]}x{p[1]}")
def pair(request: pytest.FixtureRequest) -> Pair:
    heads, head_dim = request.param
    sizes = {"num_layers": 3, "num_heads": heads, "head_dim": head_dim, "text_dim": 16, "freq_dim": 32}
    video, action = ExpertConfig(heads * head_dim, 64, **sizes), ExpertConfig(16, 32, **sizes)
    ours = WorldModel(WorldModelConfig(video, action, channels=4, attention="bidirectional")).eval()
    theirs = wan(heads, head_dim)
    ours.video.load_state_dict(theirs.state_dict(), strict=True)  # the names are diffusers'
    return ours, theirs


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 3, 4, 6, generator=g), torch.randn(2, 5, 16, generator=g)


@torch.no_grad()
@pytest.mark.parametrize("times", [(400.0, 730.0), (999.3, 0.25), (1000.0, 500.0)])
@pytest.mark.parametrize("clean", [False, True], ids=["one time", "a time a token"])
def test_forward_is_that_of_diffusers(pair: Pair, times: tuple[float, float], clean: bool) -> None:
    ours, theirs = pair
    (latents, context), timestep = inputs(), torch.tensor(times)
    a_token = timestep
    if clean:  # the first frame's tokens at time 0
        a_token = timestep[:, None].repeat(1, 3 * 2 * 3)
        a_token[:, : 2 * 3] = 0
    found = ours.velocity(latents, timestep, None, context, None, first_frame_clean=clean)
    expected = theirs(latents, a_token, context, return_dict=False)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    other = ours.velocity(latents, timestep, None, context, None, first_frame_clean=not clean)
    assert float((found - other).abs().max()) > 0.02


@torch.no_grad()
def test_a_causal_model_is_not_that_of_diffusers(pair: Pair) -> None:
    ours, theirs = pair
    causal = WorldModel(WorldModelConfig(ours.config.video, ours.config.action, channels=4)).eval()
    causal.load_state_dict(ours.state_dict())
    (latents, context), timestep = inputs(), torch.tensor([400.0, 730.0])
    found = causal.velocity(latents, timestep, None, context, None, first_frame_clean=False)
    assert float((found - theirs(latents, timestep, context, return_dict=False)[0]).abs().max()) > 0.01


def test_where_the_operations_are_the_same_so_are_the_bits(pair: Pair) -> None:
    """As in training; in inference on a CPU the GELU has another form. Patches are one matrix product here, rotations
    complex numbers, modulation fused.
    """
    ours, theirs = pair
    context = inputs()[1]
    embedder, other = ours.video.condition_embedder, theirs.condition_embedder
    x, text = torch.randn(2, 18, ours.config.video.dim), other.text_embedder(context)
    assert torch.equal(embedder.text(context), text)
    assert torch.equal(embedder.time(torch.zeros(2, 1))[0][:, 0], other(torch.zeros(2), context)[0])
    for mine, its in zip(ours.video.layers, theirs.blocks, strict=True):
        assert torch.equal(mine.ffn(x), its.ffn(x))
        with torch.no_grad():
            attended = mine.cross(x, mine.attn2.keys_values(text), None)
            assert torch.equal(attended, x + its.attn2(its.norm2(x), text, None, None))
