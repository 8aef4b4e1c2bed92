"""`simforcing evaluate`: numbers of one model, with their protocol."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Evaluate:
    """Score a model's predictions on a dataset: PSNR, PSNR on moving pixels, SSIM, sharpness, each with its interval.

    Predicted frames only; intervals resample whole episodes. Give the episodes that the model has not seen: with
    --split, those of its part 'test'.

    Example:
      simforcing evaluate runs/student/model --data data/pairs --split runs/latents/split.json --out numbers.json
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Model directory ('bundled-student', 'bundled-teacher': those that ship)."""
    data: Path
    """Paired dataset."""
    split: Path
    """Split file that `encode` wrote."""
    out: Path
    """JSON file to write; must not exist."""
    part: Literal["val", "test"] = "test"
    """Which episodes of the split."""
    per_episode: int = 1
    """Windows of each episode."""
    w: Annotated[float, tyro.conf.arg(aliases=["-w"])] = 0.6
    """Guidance weight."""
    sim_steps: int = 1
    """Sampling steps of the simulation stage."""
    real_steps: int = 10
    """Sampling steps of the real stage."""
    simulation: Literal["predicted", "rendered"] = "predicted"
    """Where the simulation comes from."""
    sim_model: str | None = None
    """Another model to predict the simulation, such as the teacher."""
    seed: int = 0
    """Noise."""

    def run(self) -> int:
        """Predicts, scores, writes."""
        import hashlib
        import json

        from simforcing.data import open_dataset
        from simforcing.data.windows import load_split
        from simforcing.errors import SimForcingError
        from simforcing.evaluate import metrics
        from simforcing.evaluate.clips import evaluation_clips
        from simforcing.evaluate.protocol import Protocol, hash_clips
        from simforcing.evaluate.statistics import bootstrap
        from simforcing.model.world_model import open_model
        from simforcing.predict.predictor import Predictor
        from simforcing.predict.sampler import Guidance
        from simforcing.train.checkpoint import write_text

        if self.out.exists():
            raise SimForcingError(f"{self.out} exists; choose another name")
        predictor = Predictor(open_model(self.checkpoint))
        rule = predictor.preparation.rule
        clips = evaluation_clips(
            open_dataset(self.data), rule, load_split(self.split).get(self.part, []), self.per_episode
        )
        begin = clips.begin(self.seed)
        reference = None
        if self.w != 0:
            source = predictor if self.sim_model is None else Predictor(open_model(self.sim_model), predictor.codec)
            reference = (
                predictor.encode(clips.sim)
                if self.simulation == "rendered"
                else source.simulation(begin, self.sim_steps)
            )
        video = predictor.decode(predictor.real(begin, self.real_steps, reference, Guidance(self.w)))
        scores = metrics.score(video, clips.real)
        protocol = Protocol(
            split_sha256=hashlib.sha256(self.split.read_bytes()).hexdigest(),
            clips_sha256=hash_clips(clips.window_names()),
            clips=len(clips),
            frames=rule.frames,
            fps=clips.fps,
            height=rule.height,
            width=rule.width,
            sim_steps=self.sim_steps,
            real_steps=self.real_steps,
            guidance=self.w,
            seed=self.seed,
        )
        found = {k: bootstrap(v, clusters=clips.episode) for k, v in scores.items()}
        result = {
            "model": str(self.checkpoint),
            "simulation": self.sim_model or self.simulation,
            "metrics": found,
            "protocol": protocol.to_dict(),
        }
        write_text(self.out, json.dumps(result, indent=2) + "\n")
        for key, value in found.items():
            metric = metrics.METRICS[key]
            print(f"{metric.label}: {value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}] {metric.unit}")
        return 0
