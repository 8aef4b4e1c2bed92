"""Parameters on the meta device, and computed memory against what is measured on a small model.

Legend: B clips, F latent frames, A actions, L context tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from simforcing.errors import SimForcingError
from simforcing.model import experts, mixture
from simforcing.model.experts import ExpertConfig
from simforcing.model.world_model import WorldModel
from simforcing.recipes import named
from simforcing.train import memory
from simforcing.train.activations import (
    Arithmetic,
    Shapes,
    activations,
    forward_work,
    sim_residuals,
)
from simforcing.train.memory import LiveBytes, Memory, Row, codec_peak, count, text_parameters, wan_vae
from simforcing.train.objective import Batch, ObjectiveConfig, draw, single_domain_loss, student_loss
from simforcing.train.recipe import Recipe

TOLERANCE = 0.15  # of measured bytes


@pytest.fixture(scope="module")
def bridge() -> Memory:
    return Memory(named("bridge-wan5b"), gpus=8)


# -- parameters -----------------------------------------------------------------------------------------------------


def test_the_video_expert_is_that_of_wan_to_the_last_parameter(bridge: Memory) -> None:
    """4.9998 billion: 30 blocks of 163,656,704 and 90,086,592 outside them."""
    from diffusers import WanTransformer3DModel

    d, ffn, text, freq, channels = 3072, 14336, 4096, 256, 48
    attention = 4 * (d * d + d) + 2 * d  # q, k, v, out with biases; the gains of two RMS norms
    block = 2 * attention + 2 * d + (2 * d * ffn + ffn + d) + 6 * d  # norm before cross-attention, ffn, modulation
    embedder = (freq * d + d) + (d * d + d) + (d * 6 * d + 6 * d) + (text * d + d) + (d * d + d)
    ends = (channels * 4 * d + d) + (d * channels * 4 + channels * 4) + 2 * d  # patches in, head, its modulation
    assert block == 163_656_704 and embedder + ends == 90_086_592
    assert count(bridge.student.video) == 30 * block + embedder + ends == 4_999_787_712
    with torch.device("meta"):
        wan = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=24, attention_head_dim=128, in_channels=48, out_channels=48,
            text_dim=4096, freq_dim=256, ffn_dim=14336, num_layers=30, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", eps=1e-6,
        )  # fmt: skip
    ours = {name: p.shape for name, p in bridge.student.video.named_parameters()}
    assert ours == {name: p.shape for name, p in wan.named_parameters()}


def test_parameters_of_the_papers_sizes(bridge: Memory) -> None:
    assert bridge.parameters() == {
        "video expert": 4_999_787_712,
        "action expert": 1_020_886_023,
        "proprioception encoder": 7 * 4096 + 4096,
        "simulation projections": 30 * (48 * 4 * 3072 + 3072),
        "unused": sum(p.numel() for _, p in bridge.student.unused_parameters()),
        "codec": 704_688_668,
        "text encoder": 5_680_910_336,
    }
    assert all(p.is_meta for p in bridge.student.parameters())


def test_the_vae_is_an_encoder_and_a_larger_decoder() -> None:
    vae = wan_vae()
    encoder = count(vae.encoder) + count(vae.quant_conv)
    decoder = count(vae.decoder) + count(vae.post_quant_conv)
    assert (encoder, decoder, encoder + decoder) == (149_637_088, 555_051_580, 704_688_668)


def test_text_encoders_without_weights_count_nothing() -> None:
    assert text_parameters("umt5:anywhere") == text_parameters("umt5-xxl")
    assert text_parameters("hashed-words") == text_parameters("some/embeddings") == 0


# -- activations against measurement --------------------------------------------------------------------------------

B, F, SIDE, A, L, CHANNELS = 2, 4, 12, 12, 11, 8
_SIZES = {"num_layers": 3, "num_heads": 4, "head_dim": 24, "text_dim": 48, "freq_dim": 32}
SHAPES = Shapes(frames=F, frame=SIDE * SIDE // 4, actions=A, context=L, latent=CHANNELS * F * SIDE * SIDE)
VIDEO, ACTION = ExpertConfig(128, 384, **_SIZES), ExpertConfig(48, 128, **_SIZES)
LIKE = dataclasses.replace(named("demo"), video=VIDEO, action=ACTION)


def small_model(sim_condition: bool) -> WorldModel:
    torch.manual_seed(0)
    config = memory.WorldModelConfig(VIDEO, ACTION, CHANNELS, sim_condition=sim_condition)
    return WorldModel(config)


def small_batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    latents, sim = (torch.randn(B, CHANNELS, F, SIDE, SIDE, generator=g) for _ in range(2))
    text, mask = torch.randn(B, L - 1, 48, generator=g), torch.ones(B, L - 1, dtype=torch.bool)
    action, proprio = torch.randn(B, A, 7, generator=g), torch.randn(B, 7, generator=g)
    return Batch(latents, action, proprio, text, mask, sim, text, mask)


def saved_bytes(step: Callable[[], Any], *models: nn.Module) -> int:
    """Bytes of all storages that autograd keeps for a step's backward, parameters left out, each counted once."""
    own = {p.untyped_storage().data_ptr() for model in models for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = step()
    assert result["total"].requires_grad
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


class _FusedNorm(torch.autograd.Function):
    """Keeps of an RMS norm what the fused kernel of a GPU keeps: input, statistic, gain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        rate = x.square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x, rate, gain)
        return x * rate * gain


@pytest.fixture(params=["written out", "fused"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Arithmetic:
    """The CPU's own operations; or the kernels that a GPU would take, as far as a CPU has them."""
    if request.param == "written out":
        return Arithmetic(item=4, written_out=True)

    def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    monkeypatch.setattr(experts, "attend", fused)
    monkeypatch.setattr(mixture, "attend", fused)
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: _FusedNorm.apply(x, self.weight, self.eps))
    return Arithmetic(item=4)


def test_activations_of_a_teachers_step(arithmetic: Arithmetic) -> None:
    model, batch, config = small_model(sim_condition=False), small_batch(), ObjectiveConfig()
    one = batch._replace(sim_latents=None, sim_text=None, sim_text_mask=None)
    draws = draw(model, one.latents, config, torch.Generator().manual_seed(0))
    measured = saved_bytes(lambda: single_domain_loss(model, one, draws), model)
    computed = activations(LIKE, SHAPES, arithmetic, clips=B, checkpointing=False)
    assert computed == pytest.approx(measured, rel=TOLERANCE)


def test_activations_of_a_students_step(arithmetic: Arithmetic) -> None:
    """Real and simulated branch go through the model; the teacher keeps nothing."""
    model, teacher = small_model(sim_condition=True), small_model(sim_condition=False).requires_grad_(False)
    batch, config = small_batch(), ObjectiveConfig()
    draws = draw(model, batch.latents, config, torch.Generator().manual_seed(0))
    measured = saved_bytes(lambda: student_loss(model, teacher, batch, draws, config), model, teacher)
    computed = activations(LIKE, SHAPES, arithmetic, clips=2 * B, checkpointing=False)
    assert computed == pytest.approx(measured, rel=TOLERANCE)


def test_a_forward_without_gradients_needs_what_is_computed() -> None:
    """An upper estimate: it may be a quarter too much, not too little."""
    model, batch = small_model(sim_condition=True), small_batch()
    times = torch.tensor([500.0, 300.0])

    def forward() -> Tensor:
        context, mask = model.context(batch.text, batch.text_mask, batch.proprio)
        return model.velocity(batch.latents, times, batch.action, context, mask, batch.sim_latents)

    with torch.no_grad():
        forward()  # tables that are made once
        with LiveBytes() as followed:
            forward()
    arithmetic = Arithmetic(item=4)
    computed = forward_work(LIKE, SHAPES, arithmetic, B) + B * sim_residuals(VIDEO, SHAPES, arithmetic)
    assert followed.peak <= computed <= 1.25 * followed.peak


def test_live_bytes_follows_storages_not_views() -> None:
    weight = torch.ones(256)
    with LiveBytes() as followed:
        a = torch.empty(1000, device="meta")
        b = a.view(10, 100) + 1
        assert followed.live == 8000
        c = weight.view(16, 16)
        del a
        assert followed.live == 4000
        del b
        d = torch.empty(500, device="meta", dtype=torch.bfloat16)
    assert (followed.live, followed.peak) == (1000, 8000)
    assert c.shape == (16, 16) and d.is_meta


def test_the_bundled_codecs_memory_grows_with_clips() -> None:
    codec, rule = Memory(named("demo")).codec, named("demo").rule
    one, four = (codec_peak(codec, rule, clips, decode=False) for clips in (1, 4))
    assert one > 4 * 3 * rule.frames * rule.height * rule.width
    assert four == pytest.approx(4 * one, rel=0.01)


# -- the table ------------------------------------------------------------------------------------------------------


def rows_of(need: Memory) -> Iterator[tuple[tuple[str, str, bool], Row]]:
    for row in need.rows:
        yield (row.stage, row.sharding, row.checkpointing), row


def test_sharding_divides_what_lasts_and_checkpointing_what_is_kept(bridge: Memory) -> None:
    rows = dict(rows_of(bridge))
    plain, sharded = rows["student", "DDP", False], rows["student", "FSDP2", False]
    total, trained = bridge.weights("student")
    unused = bridge.parameters()["unused"]
    assert (total, trained) == (6_038_493_383, 6_038_493_383 - unused)
    assert (plain.weights, plain.gradients, plain.optimiser) == (4 * total, 4 * trained, 8 * trained)
    assert plain.copies == 2 * total
    assert plain.teacher == 2 * (total - bridge.parameters()["simulation projections"])
    assert [sharded.weights, sharded.gradients, sharded.optimiser, sharded.teacher] == [
        math.ceil(x / 8) * k for x, k in ((total, 4), (trained, 4), (trained, 8), (plain.teacher // 2, 2))
    ]
    assert sharded.copies < plain.copies / 4
    assert plain.activations == sharded.activations
    for key, row in rows.items():
        if key[2]:
            assert row.activations < 0.2 * rows[(*key[:2], False)].activations


def test_a_student_keeps_a_little_over_twice_what_its_teacher_keeps(bridge: Memory) -> None:
    rows = dict(rows_of(bridge))
    ratio = rows["student", "FSDP2", False].activations / rows["teacher", "FSDP2", False].activations
    assert 2.0 < ratio < 2.1
    assert rows["teacher", "DDP", True].teacher == 0
    assert rows["baseline", "DDP", True] == dataclasses.replace(rows["teacher", "DDP", True], stage="baseline")


def test_which_stage_fits_on_a_gpu_of_80_gib(bridge: Memory) -> None:
    found = {stage: row and (row.sharding, row.checkpointing) for stage, row in bridge.cheapest(80)}
    assert found == {
        "teacher": ("FSDP2", False),
        "student": ("FSDP2", True),
        "baseline": ("FSDP2", False),
        "inference": ("none", False),
    }
    one = dict(Memory(named("bridge-wan5b")).cheapest(80))
    assert one["student"] is None and one["inference"] is not None


def test_a_total_that_fills_a_gpu_does_not_fit() -> None:
    row = Row("teacher", "none", False, 1, 0, 0, 0, 0, 0, activations=74 * 2**30)
    assert row.fits(80) and not row.fits(79.6)


def test_a_cache_and_a_checkpoint_on_disk(bridge: Memory) -> None:
    disk = bridge.disk(windows=10)
    total, trained = bridge.weights("student")
    assert disk["latents of 10 windows"] == 10 * 2 * (48 * 6 * 14 * 20) * 2
    assert disk["one checkpoint of a student"] == 4 * total + 8 * trained
    assert disk["the trained model"] == 4 * total


def test_float32_needs_no_copies_and_twice_the_activations() -> None:
    small: Recipe = named("small")
    half, full = (dict(rows_of(Memory(small, compute=c))) for c in ("bfloat16", "float32"))  # type: ignore[arg-type]
    key = ("teacher", "none", False)
    assert full[key].copies == 0 < half[key].copies
    assert 1.9 < full[key].activations / half[key].activations <= 2


def test_a_larger_batch_needs_more() -> None:
    small: Recipe = named("small")
    few, many = (dict(rows_of(Memory(small, batch=n)))["student", "none", False] for n in (2, 8))
    assert many.activations == 4 * few.activations
    assert (few.clips, many.clips) == (2, 8)


@pytest.mark.parametrize("changes", [{"gpus": 0}, {"gpus": -3}, {"batch": 0}])
def test_numbers_below_one_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(SimForcingError, match=str(*changes.values())):
        Memory(named("demo"), **changes)


def test_a_student_by_adapters_holds_the_projections_once(bridge: Memory) -> None:
    need = dataclasses.replace(bridge, gpus=1, batch=1, lora=32)
    row = need.adapters(32, "none", True)
    model = need.student
    unused = {name for name, _ in model.unused_parameters()}
    projections = sum(
        m.weight.numel() + (0 if m.bias is None else m.bias.numel())
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and ".blocks." in n and f"{n}.weight" not in unused
    )
    teacher = need.weights("teacher")[0]
    assert row.teacher == 2 * (teacher - projections)
    whole = next(r for r in need.rows if (r.stage, r.checkpointing) == ("student", True))
    assert row.weights + row.teacher < 1.1 * 2 * teacher  # not twice as much
    assert row.optimiser < 0.1 * whole.optimiser and row.activations == whole.activations
    assert row.fits(80) and not whole.fits(80)
