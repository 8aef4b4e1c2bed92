"""Files and directories that are whole or not there: written under a temporary name, then renamed.

The temporary name says which process writes, so that what a killed one left behind is recognised and removed.
"""

import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from simforcing.errors import SimForcingError


def check_new(out: Path, source: Path | None = None) -> None:
    """Refuses to write what is there, be it a link that leads nowhere, and to write into what is read.

    Raises:
        SimForcingError: `out` exists, or lies inside the dataset `source`.
    """
    if out.exists() or out.is_symlink():
        raise SimForcingError(f"{out}: exists already; choose another output, or delete it first")
    if source is not None and source.resolve() in out.resolve().parents:
        raise SimForcingError(f"{out}: lies inside {source}, which it is made from; choose a place outside")


def partial_path(out: Path) -> Path:
    """The name under which this process writes `out` before it renames it: `<out>.partial-<pid>` beside it.

    Nothing exists there: what ended processes left of `out`, and what this one left, is removed (as far as that
    is possible); what a running process writes stays.
    """
    ours = out.with_name(f"{out.name}.partial-{os.getpid()}")
    leftover = re.compile(re.escape(out.name) + r"\.partial-(\d+)")
    with suppress(OSError):
        for path in list(out.parent.iterdir()):
            found = leftover.fullmatch(path.name)
            if found and (path == ours or not _runs(int(found[1]))):
                _remove(path)
    return ours


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text aside and renames, so that the file is whole at any moment; replaces `path`.

    Raises OSError where that is not possible; then nothing is left.
    """
    partial = partial_path(path)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise


def _runs(pid: int) -> bool:
    """Whether there is a process of that number on this machine, anybody's; yes where one cannot ask."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    """Delete a file or a directory, if possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
