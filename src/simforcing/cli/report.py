"""`simforcing report`: one page of a folder of results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Report:
    """One self-contained page: results with intervals, curves of sweeps, videos in step, worst and best clips.

    Reads the result files of 'simforcing evaluate' and the folders of 'simforcing sweep' in DIR and in the folders
    directly in it, and training logs. Results of one name are seeds of one method. Results of different protocols
    are refused, unless the field is given to --allow; the page then says so.

    Example:
      simforcing report results --ours student
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Folder of results and sweeps."""
    out: Path | None = None
    """Folder of the page, index.html; default: DIR/report. A page that is there is replaced."""
    ours: str | None = None
    """Name of the method that the page is about; default: the first by name."""
    allow: tuple[str, ...] = ()
    """Fields of the protocol in which results may differ, such as code or machine."""
    title: str = ""
    """Heading of the page."""

    def run(self) -> int:
        """Writes the page, prints where it is."""
        from simforcing.evaluate.report import write_report
        from simforcing.evaluate.report.collect import collect

        page = write_report(
            self.out or self.directory / "report", collect(self.directory, self.allow, self.ours, self.title)
        )
        print(page)
        return 0
