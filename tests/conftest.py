"""Fixtures that every room shares."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """Directory of the reference vectors, real episodes and robots (`SIMFORCING_SHARED`, default `../shared`).

    Skips with a reason where it is missing, and fails instead when `CI` is set.
    """
    path = Path(os.environ.get("SIMFORCING_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        reason = f"no shared test data at {path}; set SIMFORCING_SHARED"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def parity(shared: Path) -> Path:
    """Directory of the parity vectors (`SIMFORCING_PARITY_DIR`, default `<shared>/reference`)."""
    return Path(os.environ.get("SIMFORCING_PARITY_DIR", shared / "reference"))
