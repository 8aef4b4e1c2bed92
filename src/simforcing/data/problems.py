"""What is wrong with a dataset: findings, and whether the first error ends reading or all are kept.

Every reader reports to `Problems`. Strict, as training and pairing read, the first error is raised; tolerant, as the
audit reads, everything is kept and reading goes on with what there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simforcing.errors import SimForcingError

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""From worst to mildest: unusable; probably wrong; worth knowing."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or unusual.

    kind: short stable name, such as `missing_video`. episode: its position in the dataset, None for the dataset
    itself. file: what to look at. message: one line that can stand alone.
    """

    kind: str
    severity: Severity
    message: str
    episode: int | None = None
    file: Path | None = None

    def to_dict(self, root: Path) -> dict[str, Any]:
        """JSON-able form; files are relative to the dataset where they lie in it."""
        file = self.file
        if file is not None and file.is_relative_to(root):
            file = file.relative_to(root)
        return {
            "kind": self.kind,
            "severity": self.severity,
            "episode": self.episode,
            "file": None if file is None else file.as_posix(),
            "message": self.message,
        }


@dataclass
class Problems:
    """Where readers and checks report. Strict: an error is raised as SimForcingError, milder findings are kept."""

    strict: bool = True
    findings: list[Finding] = field(default_factory=list)

    def error(self, kind: str, message: str, *, episode: int | None = None, file: Path | None = None) -> None:
        """Something that makes the episode, or the dataset, unusable. Raises SimForcingError if strict."""
        if self.strict:
            raise SimForcingError(message)
        self.findings.append(Finding(kind, "error", message, episode, file))

    def warn(self, kind: str, message: str, *, episode: int | None = None, file: Path | None = None) -> None:
        """Something that is probably wrong but can be read."""
        self.findings.append(Finding(kind, "warning", message, episode, file))

    def note(self, kind: str, message: str, *, episode: int | None = None, file: Path | None = None) -> None:
        """Something that one should know."""
        self.findings.append(Finding(kind, "note", message, episode, file))

    def ordered(self) -> list[Finding]:
        """Worst first, then by episode (the dataset's own before), in the order of reporting; each once."""
        return sorted(
            dict.fromkeys(self.findings),
            key=lambda f: (SEVERITIES.index(f.severity), f.kind, -1 if f.episode is None else f.episode),
        )

    def bad(self) -> dict[int, str]:
        """Episodes with errors and the first of each."""
        found: dict[int, str] = {}
        for finding in self.findings:
            if finding.severity == "error" and finding.episode is not None:
                found.setdefault(finding.episode, finding.message)
        return dict(sorted(found.items()))


def listed(items: Iterable[Any], most: int = 6) -> str:
    """`1, 2, 3` for a message, cut after `most` items with the number of the others."""
    every = [str(item) for item in items]
    rest = len(every) - most
    return ", ".join(every[:most]) + (f" and {rest} more" if rest > 0 else "")
