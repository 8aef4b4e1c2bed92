"""`simforcing encode`: latents and text of a paired dataset, once."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from simforcing.cli.shards import parse_shard
from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    from simforcing.data.episode import Dataset
    from simforcing.train.encode import Encoded
    from simforcing.train.recipe import Recipe
    from simforcing.train.words import Words

SPLIT = "split.json"
NO_TEXT = "none"


@dataclass(frozen=True)
class Encode:
    """Encode every window of a dataset to latents, its instructions to embeddings, and divide its episodes.

    A run that ends early goes on where it stopped when it is started again: shards that are finished are checked and
    kept. Several machines share the work by --shard 1/4, 2/4, ... on a common disk; the same command without --shard
    makes what is missing and puts everything together. Anything else in OUT is refused. A complete cache is checked,
    and shards that are damaged are made again.

    Every window is encoded on its own, because the codec encodes the first frame of a clip alone: windows that overlap
    cost as much as windows that do not. --every sets how many there are.

    Example:
      simforcing encode data/pairs runs/latents --recipe tiny
      simforcing encode data/pairs runs/latents --recipe bridge-wan5b --codec models/wan5b/codec
        --text umt5:models/wan5b/text --shard 1/8
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Paired (or simulated) dataset, as `twin pair` makes it."""
    out: Annotated[Path, tyro.conf.Positional]
    """Directory of the cache."""
    recipe: str = "demo"
    """Clip rule, codec and text encoder are the recipe's."""
    codec: str | None = None
    """Codec, where the recipe's does not come with the package: a directory or file of the Wan2.2 VAE."""
    text: str | None = None
    """Text encoder, likewise: umt5:DIR, or a directory of embeddings; 'none' leaves text out, and so does a recipe
    whose text encoder would have to be given."""
    every: int | None = None
    """Rows between the starts of windows; default the recipe's."""
    val: int | None = None
    """Episodes for validation; default a tenth, at least one."""
    test: int = 0
    """Episodes for testing."""
    seed: int = 0
    """Which episodes go where."""
    skip_bad: bool = False
    """Leave out damaged episodes, count and list them; without it they are an error."""
    workers: int = 1
    """Processes that decode and encode at once; with a large codec on a GPU one is best, and --shard a GPU."""
    shard: str | None = None
    """Make only a part of the shards, such as 1/4, the first of four."""
    device: str = "auto"
    """Where the codec computes: cpu, cuda, or auto: a GPU where there is one."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "--seed")

    def run(self) -> int:
        """Encodes and prints what was made."""
        from simforcing.cli.show import progress
        from simforcing.data.audit import open_checked
        from simforcing.model.codec import load_codec
        from simforcing.model.device import pick_device
        from simforcing.recipes import named
        from simforcing.train.encode import encode_dataset

        shard = None if self.shard is None else parse_shard(self.shard)
        if self.workers < 1:
            raise SimForcingError(f"--workers {self.workers}: give at least 1")
        found = named(self.recipe).with_sources(self.codec, needs=("codec",))
        dataset = open_checked(self.data, skip_bad=self.skip_bad, video=False)
        split = self._split(dataset, [i for i, _ in dataset.skipped], found)
        with progress() as show:
            made = encode_dataset(
                dataset,
                self.out,
                load_codec(found.codec),
                found.rule,
                self._every(found),
                words=self._words(found),
                skip_bad=self.skip_bad,
                workers=self.workers,
                codec_source=found.codec,
                shard=shard,
                device=str(pick_device(self.device)),
                report=lambda stage, done, total: show(stage, done / max(total, 1), f"{done} of {total}"),
            )
        for position, reason in made.left_out:
            print(f"skipped episode {position}: {reason}")
        if not made.complete:
            then = f"make the {made.left} that are left and put all together" if made.left else "put all together"
            print(f"{made.root}: shards of {self.shard} done; the same command without --shard will {then}")
            return 0
        if made.left_out:
            split = self._split(dataset, [i for i, _ in made.left_out], found)
        self._save_split(split, made)
        self._say(made, dataset, split)
        return 0

    def _every(self, found: "Recipe") -> int:
        return found.window_every if self.every is None else self.every

    def _words(self, found: "Recipe") -> "Words | None":
        """What embeds the instructions; None where they are left out."""
        from simforcing.train.recipe import TO_SUPPLY
        from simforcing.train.words import Words

        source = self.text or found.text
        return None if source == NO_TEXT or source in TO_SUPPLY else Words(source, found.text_length)

    def _split(self, dataset: "Dataset", without: list[int], found: "Recipe") -> dict[str, list[int]]:
        """Parts of the episodes that have a window, by their positions in the dataset."""
        from simforcing.train.encode import Pairs, divided

        content = Pairs(found.rule, self._every(found))
        return divided(dataset, content, without=without, val=self.val, test=self.test, seed=self.seed)

    def _save_split(self, split: dict[str, list[int]], made: "Encoded") -> None:
        from simforcing.data.windows import load_split, save_split

        file = self.out / SPLIT
        if file.exists() and load_split(file) != split:
            raise SimForcingError(
                f"{file} divides the episodes otherwise; choose another directory, or the same --val, --test and --seed"
            )
        save_split(file, split, made.header["source"])

    def _say(self, made: "Encoded", dataset: "Dataset", split: dict[str, list[int]]) -> None:
        from simforcing.data.cache import open_cache

        clips = len(open_cache(self.out, {}).rows("start"))
        about = made.header["text"]
        text = f"text of {about['encoder']}" if about else "no text (training will embed it)"
        skipped = f", {len(made.left_out)} skipped" if made.left_out else ""
        episodes = len(dataset) + len(dataset.skipped)
        print(
            f"{self.out}: {clips} clips of {episodes} episodes{skipped}, {', '.join(made.header['domains'])}; {text}; "
            f"{', '.join(f'{len(v)} {k}' for k, v in split.items())}"
        )
