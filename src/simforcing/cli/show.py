"""Progress on a terminal as bars, elsewhere as a few plain lines."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, float, str], None]
"""Takes a stage's name, the share that is done in [0, 1], and a few words about it."""


@contextmanager
def progress() -> Iterator[Report]:
    """A reporter of stages: bars on a terminal, else about ten lines a stage on stderr."""
    if not sys.stderr.isatty():
        yield _plain()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} % {task.fields[words]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def report(stage: str, share: float, words: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = int(bars.add_task(stage, total=1.0, words=""))
            bars.update(next(t for t in bars.task_ids if int(t) == tasks[stage]), completed=share, words=words)

        yield report


def _plain() -> Report:
    shown: dict[str, int] = {}

    def report(stage: str, share: float, words: str = "") -> None:
        tenth = int(share * 10)
        if shown.get(stage) != tenth:
            shown[stage] = tenth
            print(f"{stage}: {100 * share:.0f} % {words}".rstrip(), file=sys.stderr, flush=True)

    return report


def counted(stage: str, report: Report) -> Callable[[int, int, str], None]:
    """A reporter of one stage that takes how many are done, of how many, and a few words."""
    return lambda done, of, words: report(stage, done / of, f"{done} of {of}, {words}")
