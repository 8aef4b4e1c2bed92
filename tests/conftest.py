"""Fixtures that every room shares."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _directory(path: Path, variable: str) -> Path:
    """The directory, if it is there; else a skip with a reason, or a failure where `CI` is set."""
    if not path.is_dir():
        reason = f"no test data at {path}; set {variable}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def shared() -> Path:
    """Directory of the reference vectors, real episodes and robots (`SIMFORCING_SHARED`, default `../shared`)."""
    return _directory(Path(os.environ.get("SIMFORCING_SHARED", ROOT.parent / "shared")), "SIMFORCING_SHARED")


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest) -> Path:
    """Directory of the parity vectors (`SIMFORCING_PARITY_DIR`, default `<shared>/reference`)."""
    if given := os.environ.get("SIMFORCING_PARITY_DIR"):
        return _directory(Path(given), "SIMFORCING_PARITY_DIR")
    shared: Path = request.getfixturevalue("shared")
    return _directory(shared / "reference", "SIMFORCING_PARITY_DIR")
