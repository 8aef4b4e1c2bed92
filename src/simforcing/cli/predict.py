"""`simforcing predict`: what the camera will see."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from simforcing.cli.sampling import Sampling, check_dataset, check_targets

if TYPE_CHECKING:
    from simforcing.data.episode import Episode
    from simforcing.data.windows import ClipRule


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
    windows: int = 1
    """Windows one after the other, each from the last predicted frame of the one before."""

    def run(self) -> int:
        """Predicts, writes both files, prints the PSNR of the predicted frames."""
        import numpy as np

        from simforcing.data import open_dataset
        from simforcing.data.episode import REAL, SIM
        from simforcing.data.windows import load_clip
        from simforcing.errors import SimForcingError
        from simforcing.evaluate import metrics, strips
        from simforcing.predict.predictor import Prediction, Predictor, Start
        from simforcing.predict.rollout import rollout

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
        if self.windows < 1:
            raise SimForcingError(f"--windows {self.windows}: give at least 1")
        for i in self.episode:
            self._check_length(dataset[i], rule)
        starts = [self.start + k * (rule.frames - 1) * rule.stride for k in range(self.windows)]
        clips = [[load_clip(dataset[i], s, rule, cameras) for s in starts] for i in self.episode]
        frames = {key: np.stack([[c.frames[key] for c in row] for row in clips]) for key in cameras}  # B W T H W 3
        action, proprio = (np.stack([[getattr(c, n) for c in row] for row in clips]) for n in ("action", "proprio"))
        seeds, tasks = [self.seed + i for i in range(len(clips))], [row[0].task for row in clips]
        first_sim = frames[SIM][:, 0, 0] if SIM in frames else None

        def window(begin: Start, k: int) -> Prediction:
            rendered = frames[SIM][:, k] if SIM in frames else None
            reference = self.reference(predictor, begin, rendered)
            sim = None if reference is None else predictor.decode(reference)
            return Prediction(self.video(predictor, begin, reference), sim)

        begin = Start(frames[REAL][:, 0, 0], action[:, 0], proprio[:, 0], tasks, first_sim, seeds)
        made = rollout(window, begin, action, proprio)
        real = np.concatenate([frames[REAL][:, 0, :1], *np.moveaxis(frames[REAL][:, :, 1:], 1, 0)], axis=1)
        shown = {"real": real, "predicted": made.real} | ({} if made.sim is None else {"simulation": made.sim})
        rows = [{name: video[i] for name, video in shown.items()} for i in range(len(clips))]
        strips.write_mp4(self.out, strips.hold(strips.grid(rows), 1), dataset.fps / rule.stride)
        strips.strip(
            {f"{n} {e}": v for e, row in zip(self.episode, rows, strict=True) for n, v in row.items()},
            picture,
        )
        values = ", ".join(f"{v:.2f}" for v in metrics.psnr(shown["predicted"], real))
        print(f"{self.out} and {picture}: PSNR of predicted frames {values} dB")
        return 0

    def _check_length(self, episode: "Episode", rule: "ClipRule") -> None:
        """Refuses an episode that is too short for several windows, and says how many fit; one is checked elsewhere."""
        from simforcing.errors import SimForcingError

        step = (rule.frames - 1) * rule.stride
        rows = self.start + step * (self.windows - 1) + rule.steps
        if self.windows > 1 and rows > episode.length:
            fit = max(0, (episode.length - self.start - rule.steps) // step + 1)
            remedy = f"--windows {fit} fits" if fit else "begin earlier with --start"
            raise SimForcingError(
                f"{episode.where}: {self.windows} windows from row {self.start} need {rows} rows, it has "
                f"{episode.length}; {remedy}"
            )
