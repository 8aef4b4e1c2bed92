"""Times a chunk of actions, ours against recomputing all tokens in every denoising step, in turn.

    python benchmarks/policy.py            one thread, float32, about a minute
    python benchmarks/policy.py --json     the same rows as JSON
    python benchmarks/policy.py --full     also bfloat16, all threads, more rounds

Ours encodes the first frame and the text once and then denoises actions alone; encoding is part of its time. The
plain code passes both experts over all tokens in every step, under a dense mask: of the first frame and the actions
(`1 frame`, the least that it can do), or of the whole clip and the actions (`3 frames`). Its video head is left out.
Sizes are LIBERO's: two cameras of 224 x 224 side by side, 98 tokens a frame, 32 actions, 129 context tokens.
"""

import argparse
import sys

import torch
from common import CHANNELS, DTYPES, TEXT, TEXT_DIM, Row, all_threads, median, seconds, show
from einops import rearrange
from plain import Plain, Stream, embed_text, embed_time, video_table
from torch import Tensor

from simforcing.model.experts import ExpertConfig
from simforcing.policy.policy import Policy, PolicyConfig
from simforcing.policy.sampler import Noise, Observation, SamplerConfig, remember, sample

FRAMES, HEIGHT, WIDTH, ACTIONS, STEPS = 3, 14, 28, 32, 10
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
WANTED = 3.0


def bench_policy(seed: int = 0) -> Policy:
    """Width 512, 8 blocks, heads of 128; the rest in the proportions of the paper's 5 B model. Random weights."""
    torch.manual_seed(seed)
    shared = {"num_layers": 8, "num_heads": 4, "head_dim": 128, "text_dim": TEXT_DIM, "freq_dim": 256}
    video = ExpertConfig(dim=512, ffn_dim=2384, **shared)
    action = ExpertConfig(dim=176, ffn_dim=688, **shared)
    return Policy(PolicyConfig(video, action, CHANNELS, proprio_dim=8, horizon=ACTIONS, frames=FRAMES)).eval()


def inputs(batch: int, dtype: torch.dtype, seed: int = 1) -> tuple[Observation, Noise]:
    g = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=g).to(dtype)

    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    seen = Observation(some(CHANNELS, 1, HEIGHT, WIDTH), some(TEXT, TEXT_DIM), mask, some(8))
    return seen, Noise(some(ACTIONS, 7).float(), some(CHANNELS, FRAMES, HEIGHT, WIDTH))


def dense_mask(frames: int, frame: int, actions: int) -> Tensor:
    """Who sees whom, over [video, actions]: the first frame itself, later ones all video, actions it and actions."""
    video = frames * frame
    mask = torch.zeros(video + actions, video + actions, dtype=torch.bool)
    mask[:, :frame] = True
    mask[frame:video, frame:video] = True
    mask[video:, video:] = True
    return mask


class PlainPolicy(Plain):
    """Every step embeds everything anew and passes all tokens of both experts through all blocks."""

    def action_velocity(self, video: Tensor, action: Tensor, timestep: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        model, dtype = self.model, video.dtype
        tokens = model.video.patch_embedding(video)
        f, h, w = tokens.shape[2:]
        x, batch = rearrange(tokens, "b d f h w -> b (f h w) d"), len(video)
        times = timestep.to(dtype).expand(batch)[:, None].repeat(1, x.shape[1])
        times[:, : h * w] = 0
        _, modulation = embed_time(model.video, times.flatten(), dtype)
        a = model.action.action_encoder(action.to(dtype))
        _, action_modulation = embed_time(model.action, timestep.to(dtype).expand(batch), dtype)
        video_text, action_text = embed_text(model.video, context), embed_text(model.action, context)
        seen = [mask[:, None].expand(-1, n.shape[1], -1) for n in (x, a)]
        turns = video_table(self.tables, f, h, w)
        streams = [
            Stream(model.video, x, modulation.unflatten(0, x.shape[:2]), video_text, seen[0], turns),
            Stream(model.action, a, action_modulation, action_text, seen[1], self.action_table[: a.shape[1], None]),
        ]
        visible = dense_mask(f, h * w, a.shape[1])
        for i in range(len(model.video.layers)):
            self._block(i, streams, visible, None, None)
        return model.action.head(streams[1].x).float()

    @torch.no_grad()
    def act(self, seen: Observation, noise: Noise, frames: int) -> Tensor:
        context, mask = self.model.context(seen.text, seen.text_mask, seen.proprio)
        assert noise.video is not None
        video, action = torch.cat([seen.first, noise.video[:, :, 1:frames]], dim=2), noise.action
        for t, delta in zip(*self.model.flow.steps(STEPS), strict=True):
            action = action + delta * self.action_velocity(video, action, t[None], context, mask)
        return action


def act(policy: Policy, seen: Observation, noise: Noise) -> Tensor:
    return sample(policy, remember(policy, seen), noise._replace(video=None), SamplerConfig(STEPS)).action


def compared(policy: Policy, dtype: str, batch: int, rounds: int) -> tuple[list[Row], float]:
    """A row for each plain way, and the greatest difference between its actions and ours."""
    plain, (seen, noise) = PlainPolicy(policy), inputs(batch, DTYPES[dtype])
    reference = act(policy, seen, noise)
    worst = max(float((plain.act(seen, noise, n) - reference).abs().max()) for n in (1, FRAMES))
    times: dict[int, list[float]] = {0: [], 1: [], FRAMES: []}
    for _ in range(rounds):
        times[0].append(seconds(lambda: act(policy, seen, noise)))
        for frames in (1, FRAMES):
            times[frames].append(seconds(lambda n=frames: plain.act(seen, noise, n)))
    threads, ours = torch.get_num_threads(), median(times[0])
    names = {1: "1 frame", FRAMES: f"{FRAMES} frames"}
    return [Row(names[n], dtype, threads, batch, median(times[n]), ours) for n in names], worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    parser.add_argument("--full", action="store_true", help="all dtypes and thread counts, batches, more rounds")
    options = parser.parse_args()
    settings = [("float32", 1)]
    if options.full:
        settings = [(d, n) for d in DTYPES for n in dict.fromkeys((1, all_threads()))]
    rows: list[Row] = []
    notes = []
    for dtype, threads in settings:
        torch.set_num_threads(threads)
        policy = bench_policy().to(DTYPES[dtype]).requires_grad_(False)
        for batch in (1, 4) if options.full else (1,):
            found, worst = compared(policy, dtype, batch, 7 if options.full else 3)
            if worst > TOLERANCE[dtype]:
                sys.exit(f"ours and plain differ by {worst:.2g} in {dtype}: not the same policy, nothing to compare")
            notes.append(f"{dtype}, {threads} thread(s), batch {batch}: actions differ by {worst:.1e} at most")
            rows += found
    least = min(r.ratio for r in rows if r.dtype == "float32")
    notes.append(
        f"float32: at least {least:.1f} times as fast, wanted {WANTED:g}: {'ok' if least >= WANTED else 'MISSED'}"
    )
    show(rows, notes, options.json)
    if least < WANTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
