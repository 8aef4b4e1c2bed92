"""`simforcing predict`: what the camera will see."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from simforcing.cli.sampling import Sampling, check_dataset, check_targets


@dataclass(frozen=True)
class Predict(Sampling):
    """Predict the video that follows a first frame under the recorded actions, for one or many clips.

    Writes an mp4 with truth, prediction and simulation side by side, and the same as a strip (.png).

    Example:
      simforcing predict runs/student/model --data data/pairs --episode 0 --start 5 -w 0.6 -o out.mp4
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Model directory ('bundled-student' or 'bundled-teacher': those that ship)."""
    data: Path
    """Paired dataset."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Video to write; neither it nor the strip may exist."""
    episode: tuple[int, ...] = (0,)
    """Episodes, one row of the video each."""
    start: int = 0
    """First row of the window."""

    def run(self) -> int:
        """Predicts, writes both files, prints the PSNR of the predicted frames."""
        import numpy as np

        from simforcing.data import open_dataset
        from simforcing.data.episode import REAL, SIM
        from simforcing.data.windows import load_clip
        from simforcing.errors import SimForcingError
        from simforcing.evaluate import metrics, strips
        from simforcing.predict.predictor import Predictor, Start

        picture = self.out.with_suffix(".png")
        check_targets(self.out, picture)
        if self.out.suffix != ".mp4":
            raise SimForcingError(f"{self.out}: the video's name must end in .mp4")
        predictor = Predictor(self.open(self.checkpoint))
        dataset = open_dataset(self.data)
        check_dataset(predictor, dataset, self.checkpoint)
        cameras = [key for key in (REAL, SIM) if key in dataset.cameras]
        if REAL not in cameras:
            raise SimForcingError(f"{self.data} has no {REAL}; make pairs with 'simforcing twin pair'")
        rule = predictor.preparation.rule
        clips = [load_clip(dataset[i], self.start, rule, cameras) for i in self.episode]
        real, sim = (np.stack([c.frames[key] for c in clips]) if key in cameras else None for key in (REAL, SIM))
        assert real is not None
        action, proprio = np.stack([c.action for c in clips]), np.stack([c.proprio for c in clips])
        seeds = [self.seed + i for i in range(len(clips))]
        begin = Start(real[:, 0], action, proprio, [c.task for c in clips], None if sim is None else sim[:, 0], seeds)
        reference = self.reference(predictor, begin, sim)
        shown = {"real": real, "predicted": self.video(predictor, begin, reference)}
        if reference is not None:
            shown["simulation"] = predictor.decode(reference)
        rows = [{name: video[i] for name, video in shown.items()} for i in range(len(clips))]
        strips.write_mp4(self.out, strips.hold(strips.grid(rows), 1), dataset.fps / rule.stride)
        strips.strip(
            {f"{n} {e}": v for e, row in zip(self.episode, rows, strict=True) for n, v in row.items()},
            picture,
        )
        values = ", ".join(f"{v:.2f}" for v in metrics.psnr(shown["predicted"], real))
        print(f"{self.out} and {picture}: PSNR of predicted frames {values} dB")
        return 0
