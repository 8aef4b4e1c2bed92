"""Every command line that users are shown can be typed: README, docs, and the examples of `--help`."""

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest
import tyro

from simforcing.cli.main import COMMANDS
from simforcing.recipes import POLICIES, RECIPES

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
STARTS = r"(?:simforcing|python -m simforcing\.cli\.main|-m simforcing\.cli\.main)\s"


def in_blocks(text: str) -> Iterator[str]:
    """Lines of shell blocks, continued ones joined, `$X` filled in where the block says X="..."; a loop's i is 1."""
    for block in re.findall(r"```(?:console|bash)\n(.*?)```", text, re.DOTALL):
        values = {"i": "1"}
        for line in block.replace("\\\n", " ").splitlines():
            if said := re.match(r'\$ (\w+)="(.*)"$', line):
                values[said[1]] = said[2]
            else:
                yield Template(line.removeprefix("$ ")).safe_substitute(values)


def in_text(text: str) -> Iterator[str]:
    """Command lines inside sentences; names of commands alone are none."""
    names = {f"simforcing {command.name}" for command in COMMANDS}
    for line in re.findall(r"`(simforcing [^`]+)`", text):
        if line not in names and not line.endswith("--help"):
            yield line


def words_of(line: str) -> list[str]:
    """What follows `simforcing`, up to the end of the command; empty where the line runs something else."""
    found = re.search(STARTS, line)
    if found is None:
        return []
    words = shlex.split(line[found.end() :], comments=True)
    ends = (i for i, word in enumerate(words) if word in ("&", ">"))
    return words[: next(ends, None)]


def shown() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text()
        for line in (*in_blocks(text), *in_text(text)):
            yield page.name, line
    for command in COMMANDS:
        example = (inspect.getdoc(command.load()) or "").partition("Example:")[2]
        for line in example.replace("\\\n", " ").splitlines():
            yield f"{command.name} --help", line.strip()


LINES = sorted({(where, *words_of(line)) for where, line in shown() if words_of(line)})


def test_there_are_lines_of_every_command() -> None:
    assert len(LINES) > 60
    assert {c.words for c in COMMANDS} <= {words[1 : 1 + len(c.words)] for words in LINES for c in COMMANDS}


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line[0]}: {' '.join(line[1:])}"[:90])
def test_it_parses(line: tuple[str, ...]) -> None:
    _, *words = line
    command = next(c for c in COMMANDS if tuple(words[: len(c.words)]) == c.words)
    try:
        options = tyro.cli(command.load(), args=words[len(command.words) :], console_outputs=False)
    except SystemExit:
        pytest.fail("it does not parse")
    assert getattr(options, "recipe", "demo") in (*RECIPES, *POLICIES)


@pytest.mark.parametrize("line", ["simforcing train pupil --data runs/latents", "simforcing predict --day 3"])
def test_what_does_not_parse_is_found(line: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="does not parse"):
        test_it_parses(("here", *words_of(line)))
