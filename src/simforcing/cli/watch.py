"""Rollouts of held-out clips while a model trains.

Legend: B clips, C channels, F h w latents, T frames, H W pixels.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from simforcing.evaluate import metrics, strips
from simforcing.files import partial_path
from simforcing.model.codec import to_pixels
from simforcing.model.world_model import WorldModel
from simforcing.predict.sampler import Guidance, Inputs, sample, start_noise, two_stages
from simforcing.train.batches import LatentClips
from simforcing.train.parallel import Team, whole

CLIPS, SIM_STEPS, REAL_STEPS, FPS = 4, 1, 10, 5.0


class Rollouts:
    """Predicts fixed held-out clips; PSNR and SSIM against what the codec makes of the truth.

    Writes OUT/rollouts/step-XXXXXXXX.png and .mp4, truth above prediction. The noise of clip i follows from seed + i.
    Sharded weights are gathered in the main process, which predicts alone.
    """

    def __init__(self, clips: LatentClips, out: Path, team: Team, seed: int = 0) -> None:
        self._rows = torch.linspace(0, len(clips) - 1, min(len(clips), CLIPS)).round().long()
        self._clips, self._out, self._team, self._seed = clips, out / "rollouts", team, seed
        self._truth: np.ndarray | None = None

    def __call__(self, step: int, model: WorldModel) -> dict[str, float]:
        """The mean of each metric; all processes must ask."""
        if self._team.kind == "fsdp":
            model = whole(model, self._team)
            if self._team.main:
                model = model.to(self._team.device)
        return self._team.on_main(lambda: self._written(step, model))

    def _written(self, step: int, model: WorldModel) -> dict[str, float]:
        assert model.preparation is not None
        codec = model.preparation.load_codec().to(model.device)

        def pixels(latents: Tensor) -> np.ndarray:
            with torch.inference_mode():
                return to_pixels(codec.decode(latents.to(model.device))).cpu().numpy()

        if self._truth is None:
            self._truth = pixels(self._clips.take(self._rows).latents)
        shown = {"truth": self._truth, "predicted": pixels(model.run(self._predicted))}
        self._out.mkdir(parents=True, exist_ok=True)
        name = f"step-{step:08d}"
        columns = [{kind: video[i] for kind, video in shown.items()} for i in range(len(self._rows))]
        picture, video = (self._out / f"{name}{end}" for end in (".png", ".mp4"))
        parts = {target: partial_path(target).with_suffix(target.suffix) for target in (picture, video)}
        named = {f"{kind} {i}": video for i, column in enumerate(columns) for kind, video in column.items()}
        strips.strip(named, parts[picture])
        strips.write_mp4(parts[video], strips.grid(columns), FPS)
        for target, partial in parts.items():
            partial.replace(target)
        scores = {"psnr": metrics.psnr, "ssim": metrics.ssim}
        return {
            f"rollout_{k}": round(float(score(shown["predicted"], self._truth).mean()), 4)
            for k, score in scores.items()
        }

    def _predicted(self, model: WorldModel) -> Tensor:
        """Latents [B, C, F, h, w] of the domain that is learnt, under the model's own simulation where it has one."""
        batch = self._clips.take(self._rows).to(model.device)
        inputs = Inputs(batch.action, batch.proprio, batch.text, batch.text_mask)
        first, frames = batch.latents[:, :, :1], batch.latents.shape[2]
        noise = start_noise(first, frames, [self._seed + i for i in range(len(first))])
        if batch.sim_latents is None or model.sim is None:
            return sample(model, first, inputs, noise, REAL_STEPS)
        other = batch.simulated()
        sim_inputs = (
            inputs if batch.sim_text is None else Inputs(other.action, other.proprio, other.text, other.text_mask)
        )
        first_sim = batch.sim_latents[:, :, :1]
        return two_stages(model, first, first_sim, inputs, sim_inputs, noise, SIM_STEPS, REAL_STEPS, Guidance()).real
