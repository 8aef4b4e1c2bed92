"""The networks through which metrics look: their weights by path, or fetched once from their usual address.

Nothing stands in for a network that is not there: `Unavailable` says why, and the metric is reported as that.
"""

import hashlib
import os
import pickle
import urllib.error
import urllib.request
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from simforcing.errors import SimForcingError
from simforcing.files import partial_path

TIMEOUT = 30.0
"""Seconds without an answer after which an address counts as unreachable."""


class Unavailable(SimForcingError):
    """A metric cannot be measured here; the message says why and what would help."""


@dataclass(frozen=True)
class Source:
    """Where a network's weights usually come from; `sha256` is as much of the hash as is known in advance. Where it is
    empty, what comes must at least be a whole zip archive, as TorchScript is.
    """

    file: str
    url: str
    sha256: str = ""


_TORCH = "https://download.pytorch.org/models"
_HEADS = "https://raw.githubusercontent.com/richzhang/PerceptualSimilarity/master/lpips/weights/v0.1"
_NVLABS = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics"

SOURCES: dict[str, Source] = {
    "alexnet": Source("alexnet-owt-7be5be79.pth", f"{_TORCH}/alexnet-owt-7be5be79.pth", "7be5be79"),
    "vgg16": Source("vgg16-397923af.pth", f"{_TORCH}/vgg16-397923af.pth", "397923af"),
    "lpips-alex": Source(
        "lpips-alex.pth", f"{_HEADS}/alex.pth", "df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0"
    ),
    "lpips-vgg": Source(
        "lpips-vgg.pth", f"{_HEADS}/vgg.pth", "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868"
    ),
    "inception": Source("inception-2015-12-05.pt", f"{_NVLABS}/inception-2015-12-05.pt"),
    "i3d": Source("i3d_torchscript.pt", "https://www.dropbox.com/s/ge9e5ujwgetktms/i3d_torchscript.pt?dl=1"),
}


def default_directory() -> Path:
    """Where fetched weights are kept."""
    return Path.home() / ".cache" / "simforcing" / "networks"


@dataclass(frozen=True)
class Networks:
    """Finds weights: first in `paths` (a name of `SOURCES` to a file), then in `directory`, then at their address.

    download: False never asks the network.
    """

    directory: Path = field(default_factory=default_directory)
    paths: Mapping[str, Path] = field(default_factory=dict)
    download: bool = True

    def __post_init__(self) -> None:
        for name, path in self.paths.items():
            if name not in SOURCES:
                raise SimForcingError(f"there is no network '{name}'; known: {', '.join(SOURCES)}")
            if not path.is_file():
                raise SimForcingError(f"network {name}: there is no file {path}")

    def file(self, name: str) -> Path:
        """The weights of a network of `SOURCES`; fetched into `directory` where they are missing.

        Raises:
            Unavailable: there is no file, and it cannot be fetched.
        """
        if name in self.paths:
            return self.paths[name]
        source = SOURCES[name]
        target = self.directory / source.file
        if target.is_file():
            return target
        if not self.download:
            raise Unavailable(f"no {source.file} in {self.directory}; put {source.url} there")
        reason = _fetch(source, target)
        if reason:
            raise Unavailable(f"no {source.file} in {self.directory}, and {source.url} gave none ({reason})")
        return target

    def sha256(self, name: str) -> str:
        """Hash of a network's file, for the protocol."""
        path = self.file(name)
        return _hash(path, path.stat().st_mtime_ns)

    def state(self, name: str) -> dict[str, Tensor]:
        """A file of tensors by name, read without running code.

        Raises:
            Unavailable: see `file`.
            SimForcingError: the file holds something else.
        """
        path = self.file(name)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise SimForcingError(f"network {name}: {path} is no file of plain weights ({_line(error)})") from error
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
            raise SimForcingError(f"network {name}: {path} holds no weights by name")
        return found

    def script(self, name: str) -> torch.jit.ScriptModule:
        """A TorchScript file. It is a program: TorchScript has no access to files or the network, but give only files
        whose origin you trust. The field's I3D and Inception exist in this form alone.

        Raises:
            Unavailable: see `file`.
            SimForcingError: the file is no TorchScript.
        """
        path = self.file(name)
        try:
            with warnings.catch_warnings():  # TorchScript is deprecated, but the field's networks are published in it
                warnings.simplefilter("ignore", DeprecationWarning)
                module: torch.jit.ScriptModule = torch.jit.load(str(path), map_location="cpu").eval()
        except RuntimeError as error:
            raise SimForcingError(f"network {name}: {path} is no TorchScript file ({_line(error)})") from error
        return module


@cache
def _fetch(source: Source, target: Path) -> str:
    """Empty, or why there is nothing; asked once a process."""
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(target)
        with urllib.request.urlopen(source.url, timeout=TIMEOUT) as answer, partial.open("wb") as file:
            while block := answer.read(1 << 20):
                file.write(block)
            wanted, came = answer.headers.get("Content-Length"), file.tell()
        if wanted is not None and came != int(wanted):
            return f"the download ended after {came} of {wanted} bytes"
        if not source.sha256 and not zipfile.is_zipfile(partial):
            return f"the {came} bytes that came are no TorchScript file"
        found = _hash(partial, 0)
        if not found.startswith(source.sha256):
            return f"its sha256 is {found[:16]}..., not {source.sha256[:16]}..."
        os.replace(partial, target)
    except (OSError, urllib.error.URLError) as error:
        return _line(error)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return ""


@cache
def _hash(path: Path, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
