"""Temporary names: those of ended processes are cleared away, those of running ones stay; text is replaced whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simforcing.files import partial_path, write_text


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_ended_processes_and_our_own_are_removed(tmp_path: Path, ended: int) -> None:
    out, running = tmp_path / "a[1].json", os.getppid()
    for kept in (f"{out.name}.partial-{running}", f"b.partial-{ended}", f"{out.name}.partial-x", out.name):
        (tmp_path / kept).write_text("kept")
    before = sorted(p.name for p in tmp_path.iterdir())
    (tmp_path / f"{out.name}.partial-{ended}").write_text("half")
    (tmp_path / f"{out.name}.partial-{'9' * 30}").write_text("half")
    (tmp_path / f"{out.name}.partial-{os.getpid()}").mkdir()
    (tmp_path / f"{out.name}.partial-{os.getpid()}" / "inside").write_text("half")
    assert partial_path(out) == tmp_path / f"{out.name}.partial-{os.getpid()}"
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_parent_that_does_not_exist_is_no_error(tmp_path: Path) -> None:
    assert partial_path(tmp_path / "no" / "a").name == f"a.partial-{os.getpid()}"
    assert list(tmp_path.iterdir()) == []


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "one")
    write_text(tmp_path / "a.json", "two \N{GREEK SMALL LETTER ALPHA}")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "two \N{GREEK SMALL LETTER ALPHA}"


def test_text_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("one")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.json", "\ud800")
    (tmp_path / "d").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "d", "text")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "d"]
    assert (tmp_path / "a.json").read_text() == "one"
