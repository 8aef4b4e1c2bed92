"""`simforcing evaluate`: numbers of one model, with their protocol."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from simforcing.cli.sampling import Sampling, check_dataset, check_targets


@dataclass(frozen=True)
class Evaluate(Sampling):
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

    def run(self) -> int:
        """Predicts, scores, writes."""
        import hashlib
        import json

        from simforcing.data import open_dataset
        from simforcing.evaluate import metrics
        from simforcing.evaluate.clips import evaluation_clips, held_out
        from simforcing.evaluate.protocol import Protocol, hash_clips
        from simforcing.evaluate.statistics import bootstrap
        from simforcing.files import write_text
        from simforcing.predict.predictor import Predictor

        check_targets(self.out)
        predictor, dataset = Predictor(self.open(self.checkpoint)), open_dataset(self.data)
        check_dataset(predictor, dataset, self.checkpoint)
        rule = predictor.preparation.rule
        clips = evaluation_clips(dataset, rule, held_out(dataset, self.split, self.part), self.per_episode)
        begin = clips.begin(self.seed)
        video = self.video(predictor, begin, self.reference(predictor, begin, clips.sim))
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
            "simulation": self.source,
            "metrics": found,
            "protocol": protocol.to_dict(),
        }
        write_text(self.out, json.dumps(result, indent=2) + "\n")
        for key, value in found.items():
            metric = metrics.METRICS[key]
            print(f"{metric.label}: {value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}] {metric.unit}")
        return 0
