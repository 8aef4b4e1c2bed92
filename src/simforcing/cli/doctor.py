"""`simforcing doctor`: can this machine render, train and write videos, and what memory does a recipe need?"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simforcing.errors import SimForcingError

if TYPE_CHECKING:
    from simforcing.train.memory import Memory, Row

_GIB = 2**30
_RENDER = """
import simforcing.twin
import mujoco
sphere = "<light pos='0 0 3'/><geom type='sphere' size='1' rgba='1 0 0 1'/>"
model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{sphere}</worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 48, 64) as renderer:
    renderer.update_scene(data)
    centre = renderer.render()[24, 32]
assert centre[0] > 20 and centre[0] > 2 * int(centre[2]), f"a red sphere came out as {centre}"
"""


@dataclass(frozen=True)
class Check:
    """Outcome of one check; `detail` says what was found or what to do."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Doctor:
    """Check Python, torch, off-screen rendering, H.264 encoding and disk space.

    Prints one line a check and exits with 1 when one fails. With --memory nothing is checked: it prints what a recipe
    needs in memory and on disk, computed from its configuration.

    Example:
      simforcing doctor --path runs
      simforcing doctor --memory bridge-wan5b --gpus 8
    """

    path: Path = Path(".")
    """Where runs will be written."""
    disk_gib: float = 2.0
    """Free space wanted there, GiB."""
    memory: str | None = None
    """A recipe whose memory is computed."""
    gpus: int = 1
    """With --memory: number of GPUs."""
    gpu_gib: float = 80.0
    """With --memory: memory of one of them, GiB."""
    batch_size: int | None = None
    """With --memory: clips a GPU and step; default the recipe's."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """With --memory: what is computed in. Master weights, gradients and optimiser are float32."""
    lora: int | None = None
    """With --memory: rank of a student by adapters (train --lora), which gets rows of its own."""
    windows: int = 1000
    """With --memory: encoded windows, for the size of the cache on disk."""
    json: bool = False
    """With --memory: print JSON, sizes in bytes."""

    def run(self) -> int:
        """Run every check, print the table, return 0 when all are ok and 1 otherwise."""
        if self.memory is not None:
            return self.run_memory(self.memory)
        if self.json:
            raise SimForcingError("--json goes with --memory RECIPE")
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        checks = [check() for check in self.checks()]
        table = Table(box=None, pad_edge=False)
        for title in ("check", "", "detail"):
            table.add_column(title, overflow="fold")
        for check in checks:
            table.add_row(check.name, "ok" if check.ok else "[bold red]FAILED[/]", escape(check.detail))
        Console().print(table)
        return 0 if all(check.ok for check in checks) else 1

    def run_memory(self, name: str) -> int:
        """Prints what the recipe of this name needs.

        Raises:
            SimForcingError: there is no such recipe, or a number is out of range.
        """
        if self.windows < 1 or not self.gpu_gib > 0:
            raise SimForcingError(f"--windows {self.windows}, --gpu-gib {self.gpu_gib:g}: both must be above zero")
        from simforcing.recipes import named
        from simforcing.train.memory import Memory

        need = Memory(named(name), self.gpus, self.batch_size, self.precision, self.lora)
        print(self._as_json(need, name) if self.json else self._as_text(need, name))
        return 0

    def _as_json(self, need: "Memory", name: str) -> str:
        from simforcing.train.work import training

        rows = [asdict(row) | {"total": row.total, "fits": row.fits(self.gpu_gib)} for row in need.rows]
        return json.dumps(
            {
                "recipe": name,
                "gpus": self.gpus,
                "gpu_gib": self.gpu_gib,
                "precision": self.precision,
                "computed": "from the configuration, not measured",
                "parameters": need.parameters(),
                "stages": rows,
                "encoding": need.encoding(),
                "disk": need.disk(self.windows),
                "operations": training(need),
            },
            indent=2,
        )

    def _as_text(self, need: "Memory", name: str) -> str:
        from simforcing.train.work import training

        count = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        lines = [
            f"{name} on {count}: memory per GPU in GiB, computed from the configuration, not measured.",
            f"Computing in {self.precision}; trained weights, gradients and AdamW's moments in float32.",
            "",
            *_stage_lines(need.rows, self.gpu_gib),
            "",
            "gathered: weights in the computing type, all of them (none, DDP) or what FSDP2 gathers at once.",
            *_fit_lines(need, self.gpu_gib),
        ]
        for title, values, unit in (
            ("parameters", need.parameters(), 1),
            ("encoding, GiB", need.encoding(), _GIB),
            ("disk, GiB", need.disk(self.windows), _GIB),
            ("operations, 10^12 (a multiply-add is two)", training(need), 10**12),
        ):
            lines += ["", f"{title}:"]
            lines += [f"  {k:36} {_number(v, unit):>14}" for k, v in values.items()]
        return "\n".join(lines)

    def checks(self) -> list[Callable[[], Check]]:
        """The checks in the order of the table."""
        return [check_python, check_torch, check_rendering, check_video, self.check_disk]

    def check_disk(self) -> Check:
        """Free space at `path`, or at its nearest existing parent."""
        place = self.path.resolve()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free / _GIB
        return Check("disk", free >= self.disk_gib, f"{free:.1f} GiB free at {place} ({self.disk_gib:g} wanted)")


def _number(value: int, unit: int) -> str:
    """A count as it is, bytes in GiB, operations to four digits."""
    return f"{value:,}" if unit == 1 else f"{value / unit:.2f}" if unit == _GIB else f"{value / unit:.4g}"


def _stage_lines(rows: "list[Row]", gpu_gib: float) -> list[str]:
    """The table of stages, one line a way to run them."""
    parts = ("weights", "gradients", "optimiser", "gathered", "teacher", "activations", "total")
    lines = [f"{'stage':10}{'sharding':9}{'recomputed':11}{'clips':>5}{''.join(f'{p:>12}' for p in parts)}  fits"]
    for row in rows:
        values = (row.weights, row.gradients, row.optimiser, row.copies, row.teacher, row.activations, row.total)
        numbers = "".join(f"{v / _GIB:12.2f}" if v else f"{'-':>12}" for v in values)
        again = "-" if row.stage == "inference" else "each block" if row.checkpointing else "nothing"
        fits = "yes" if row.fits(gpu_gib) else "no"
        lines.append(f"{row.stage:10}{row.sharding:9}{again:11}{row.clips:5}{numbers}  {fits}")
    return lines


def _fit_lines(need: "Memory", gpu_gib: float) -> list[str]:
    """For each stage whether, and how, it fits."""
    from simforcing.train.memory import RESERVE_GIB, RESERVE_SHARE

    reserve = f"{RESERVE_GIB:g} GiB and {RESERVE_SHARE:.0%} kept for CUDA, NCCL and fragmentation"
    lines = [f"On a GPU of {gpu_gib:g} GiB ({reserve}):"]
    for stage, row in need.cheapest(gpu_gib):
        if row is None:
            lines.append(f"  {stage}: does not fit in any of these ways")
            continue
        way = "" if row.sharding == "none" else f" with {row.sharding}"
        how = "" if stage == "inference" else f"{way}, {'' if row.checkpointing else 'no '}activation checkpointing"
        lines.append(f"  {stage}: fits{how}")
    return lines


def check_python() -> Check:
    """Python 3.11 or newer."""
    return Check("python", sys.version_info >= (3, 11), f"{sys.version.split()[0]}, {os.cpu_count()} cores")


def check_torch() -> Check:
    """Torch multiplies, and on which devices it could."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", False, f"{error}; install torch first, see constraints.txt")
    product = float((torch.full((8, 8), 2.0) @ torch.full((8, 8), 3.0)).sum())
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("torch", product == 3072.0, f"{torch.__version__}, {', '.join(gpus) or 'CPU only'}")


def check_rendering() -> Check:
    """MuJoCo draws a red sphere off screen, with the renderer of `MUJOCO_GL` or `simforcing.twin`.

    Where that fails, the others are tried, to name one that works. Each attempt is a process of its own,
    since a failed context can take its process with it.
    """
    problem = _draw(os.environ)
    if problem is None:
        chosen = os.environ.get("MUJOCO_GL", "chosen automatically")
        return Check("rendering", True, f"mujoco {importlib.metadata.version('mujoco')}, renderer {chosen}")
    for renderer in ("egl", "osmesa"):
        if _draw({**os.environ, "MUJOCO_GL": renderer}) is None:
            return Check("rendering", False, f"{problem}; MUJOCO_GL={renderer} works, so set it")
    return Check("rendering", False, f"{problem}; scripts/setup.sh names the system packages")


def _draw(environment: Mapping[str, str]) -> str | None:
    """Why the sphere could not be drawn in `environment`; None if it could."""
    command = [sys.executable, "-c", _RENDER]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "no picture after 120 s"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"


def check_video() -> Check:
    """Eight frames written as H.264 and read back, as datasets do it."""
    try:
        import av
        import numpy as np

        from simforcing.data.video import VideoFile, VideoWriter
    except (ImportError, OSError) as error:
        return Check("video", False, f"{error}; pip install av numpy")
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    frames = np.broadcast_to(ramp[None, None, :, None], (8, 48, 64, 3)).copy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.mp4"
        try:
            writer = VideoWriter(path, fps=5.0, height=48, width=64)
            writer.write(frames)
            writer.close()
            back = VideoFile(path, 5.0).at([i / 5.0 for i in range(8)])
        except (av.FFmpegError, ValueError, OSError, SimForcingError) as error:
            return Check("video", False, f"av {av.__version__}: {error}; install a build of av with libx264")
    off = float(np.abs(back.astype(np.float64) - frames).mean())
    return Check("video", off < 8.0, f"av {av.__version__}, H.264, mean error {off:.1f} of 255")
