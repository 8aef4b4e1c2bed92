"""`simforcing encode`: latents of a paired dataset, once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

SPLIT = "split.json"


@dataclass(frozen=True)
class Encode:
    """Encode every window of a dataset to latents, and divide its episodes into train, val and test.

    A complete cache of the same dataset and settings is kept; anything else in OUT is refused.

    Example:
      simforcing encode data/pairs runs/latents --recipe tiny
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Paired (or simulated) LeRobot v3.0 dataset, as `twin pair` makes it."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory of the cache."""
    recipe: str = "demo"
    """Clip rule and codec are the recipe's."""
    every: int | None = None
    """Rows between the starts of windows; default the recipe's."""
    val: int | None = None
    """Episodes for validation; default a tenth, at least one."""
    test: int = 0
    """Episodes for testing."""
    seed: int = 0
    """Which episodes go where."""

    def run(self) -> int:
        """Encodes and prints what was made."""
        from simforcing.cli.show import progress
        from simforcing.data import open_dataset
        from simforcing.data.windows import load_split, save_split, split_episodes
        from simforcing.errors import SimForcingError
        from simforcing.model.codec import load_codec
        from simforcing.recipes import recipe
        from simforcing.train.encode import encode_dataset

        found, dataset = recipe(self.recipe), open_dataset(self.data)
        val = max(1, len(dataset) // 10) if self.val is None else self.val
        split = split_episodes(len(dataset), {"train": None, "val": val, "test": self.test}, self.seed)
        if not split["train"]:
            raise SimForcingError(
                f"{self.data}: {len(dataset)} episodes leave none to train on with {val} for validation and "
                f"{self.test} for testing"
            )
        with progress() as report:
            header = encode_dataset(
                dataset,
                self.out,
                load_codec(found.codec),
                found.rule,
                found.window_every if self.every is None else self.every,
                lambda done, total: report("encoding", done / total, f"{done} of {total} clips"),
            )
        file = self.out / SPLIT
        if file.exists() and load_split(file) != split:
            raise SimForcingError(
                f"{file} divides the episodes otherwise; choose another directory, or the same --val, --test and --seed"
            )
        save_split(file, split, header["source"])
        print(
            f"{self.out}: {header['clips']} clips of {len(dataset)} episodes, {', '.join(header['domains'])}; "
            f"{', '.join(f'{len(v)} {k}' for k, v in split.items())}"
        )
        return 0
