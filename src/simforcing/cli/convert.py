"""`simforcing import` and `simforcing export`: checkpoints of others, and back."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from simforcing.errors import SimForcingError, check_seed

if TYPE_CHECKING:
    from simforcing.cli.show import Report
    from simforcing.model.importing import PreparationSource
    from simforcing.model.wan import WanTransformer

_PREPARING = ("stats", "codec", "text", "text_length", "frames", "stride", "height", "width", "convention")
_ONLY_RELEASED = (*_PREPARING, "heads", "eps")
_ONLY_WAN = (
    "action_backbone", "action_width", "action_ffn", "action_dim", "proprio_dim", "seed", "transformer_only",
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """Bring a checkpoint of the authors (.pt), or a directory of Wan2.2-TI2V-5B, into a model directory.

    What it is follows from what it holds. Weights keep their dtype. A released teacher or student becomes one that
    predicts once statistics, codec and text encoder are given; without them it takes latents only. Of a Wan release
    (diffusers' layout or the original one) the VAE and the text encoder come along, as OUT/codec and OUT/text.

    Example:
      simforcing import Wan2.2-TI2V-5B models/wan5b
      simforcing import student.pt models/student --stats dataset_stats.json --codec models/wan5b/codec
        --text umt5:models/wan5b/text
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """The authors' .pt file, or a directory of Wan2.2-TI2V-5B."""
    out: Annotated[Path, tyro.conf.Positional]
    """Model directory to write; must not exist."""
    stats: Path | None = None
    """Of a .pt: its run's dataset_stats.json."""
    codec: str | None = None
    """Of a .pt: its VAE, a directory of diffusers or Wan2.2_VAE.pth. Stays where it is."""
    text: str | None = None
    """Of a .pt: umt5:DIR, or a directory of embeddings (<sha256>.t5_len128.wan22ti2v5b.pt). Stays where it is."""
    text_length: int = 128
    """Of a .pt: context tokens."""
    frames: int = 21
    """Of a .pt: pictures of a clip (1 + 4 n)."""
    stride: int = 1
    """Of a .pt: steps between two pictures."""
    height: int = 224
    """Of a .pt: pixels."""
    width: int = 320
    """Of a .pt: pixels."""
    convention: Path | None = None
    """Of a .pt: JSON that says what its actions mean, or a dataset's meta/simforcing.json (default: Bridge's)."""
    heads: int | None = None
    """Of a .pt: attention heads, where they are not the paper's 24 of 128."""
    eps: float = 1e-6
    """Of a .pt: epsilon of its norms."""
    action_backbone: Path | None = None
    """Of a Wan release: the authors' file of initial weights for the action expert (default: resized here)."""
    action_width: int = 1024
    """Of a Wan release: width of the action expert."""
    action_ffn: int = 4096
    """Of a Wan release: width of its feed-forward nets."""
    action_dim: int = 7
    """Of a Wan release: numbers of an action."""
    proprio_dim: int = 7
    """Of a Wan release: numbers of a state."""
    seed: int = 0
    """Of a Wan release: for the layers that have no weights to start from."""
    transformer_only: bool = False
    """Of a Wan release: leave VAE and text encoder out."""

    def run(self) -> int:
        """Reads, checks every tensor, writes the directory, prints what it is."""
        from simforcing.cli.show import progress
        from simforcing.model.importing import recognise
        from simforcing.model.wan import WanTransformer

        check_seed(self.seed, "--seed")
        if self.out.exists():
            raise SimForcingError(f"{self.out} exists; choose another directory, nothing was written")
        with progress() as report:
            report("import", 0.0, f"reading {self.checkpoint}")
            found = recognise(self.checkpoint)
            words = self._wan(found, report) if isinstance(found, WanTransformer) else self._released(found, report)
            report("import", 1.0, "done")
        print(f"{self.out}: {words}")
        return 0

    def _released(self, content: Any, report: "Report") -> str:
        from simforcing.model.importing import import_released

        self._refuse(_ONLY_WAN, "a Wan release")
        source = self._source()
        found = import_released(
            content,
            self.checkpoint,
            self.out,
            source,
            self.heads,
            self.eps,
            step=lambda words: report("import", 0.5, words),
        )
        left = f"; left out: {', '.join(found.left_out)}" if found.left_out else ""
        unprepared = "" if source else "; it takes latents only (give --stats, --codec and --text to predict videos)"
        return f"released {found.role} of step {found.step}, {_size(found.state.values())}{left}{unprepared}"

    def _wan(self, found: "WanTransformer", report: "Report") -> str:
        from simforcing.model.importing import ActionSizes, import_wan

        self._refuse(_ONLY_RELEASED, "a .pt")
        sizes = ActionSizes(self.action_width, self.action_ffn, self.action_dim, self.proprio_dim, self.seed)
        config, absent = import_wan(
            found,
            self.out,
            sizes,
            self.action_backbone,
            self.transformer_only,
            step=lambda words: report("import", 0.5, words),
        )
        start = "the video expert's, resized" if self.action_backbone is None else str(self.action_backbone)
        rest = f"; the release has no {' and no '.join(absent)}" if absent else ""
        layers, width = config.video.num_layers, config.video.dim
        return f"world model from Wan ({found.layout} layout), {layers} blocks of {width}, action expert: {start}{rest}"

    def _given(self, names: tuple[str, ...]) -> list[str]:
        """Those of the named options that are not at their default, as typed."""
        defaults = {field.name: field.default for field in fields(self)}
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != defaults[name]]

    def _refuse(self, names: tuple[str, ...], owner: str) -> None:
        if given := self._given(names):
            raise SimForcingError(f"{self.checkpoint}: {', '.join(given)} is for {owner}; leave it out")

    def _source(self) -> "PreparationSource | None":
        """What prepares inputs; None where nothing of it is given."""
        from simforcing.data.windows import ClipRule
        from simforcing.model.importing import PreparationSource

        if not self._given(_PREPARING):
            return None
        if self.stats is None or self.codec is None or self.text is None:
            missing = [f"--{name}" for name in ("stats", "codec", "text") if getattr(self, name) is None]
            raise SimForcingError(f"statistics, codec and text encoder go together: give {' and '.join(missing)} too")
        rule = ClipRule(self.frames, self.stride, self.height, self.width)
        return PreparationSource(self.stats, self.codec, self.text, self.text_length, rule, self.convention)


@dataclass(frozen=True)
class Export:
    """Write a model directory as a checkpoint of the authors, `{mot, proprio_encoder, step, torch_dtype}`.

    Bit by bit: what was imported comes out as it went in. A model that the layout cannot hold is refused.

    Example:
      simforcing export models/student student.pt
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Model directory."""
    out: Annotated[Path, tyro.conf.Positional]
    """File to write (.pt); must not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Convert the weights (default: as they are stored)."""
    step: int | None = None
    """Training step to write (default: the imported file's, else 0)."""

    def run(self) -> int:
        """Writes the file and prints what is in it."""
        from simforcing.cli.sampling import check_targets
        from simforcing.cli.show import progress
        from simforcing.model.released import export_released

        check_targets(self.out)
        if not self.model.is_dir():
            raise SimForcingError(f"{self.model} is no model directory")
        with progress() as report:
            report("export", 0.0, f"reading {self.model}")
            count, dtype = export_released(self.model, self.out, self.dtype, self.step)
            report("export", 1.0, "done")
        print(f"{self.out}: {count} tensors, {str(dtype).removeprefix('torch.')}")
        return 0


def _size(tensors: Any) -> str:
    """`5.91 B parameters in bfloat16`, of any tensors."""
    kept = list(tensors)
    number = sum(t.numel() for t in kept)
    amount = f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number:,}"
    return f"{amount} parameters in {', '.join(sorted({str(t.dtype).removeprefix('torch.') for t in kept}))}"
