"""What several commands are tried on."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from simforcing.data.cache import source_hash
from simforcing.data.windows import save_split


@dataclass(frozen=True)
class Pairs:
    """A few paired episodes of the bundled world, all of them held out."""

    data: Path
    split: Path


@pytest.fixture(scope="session")
def held_out_pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Two episodes."""
    from simforcing.twin.playground import write_pairs

    root = tmp_path_factory.mktemp("world")
    write_pairs(root / "pairs", range(90, 92), workers=1)
    save_split(root / "split.json", {"val": [0, 1]}, source_hash(root / "pairs"))
    return Pairs(root / "pairs", root / "split.json")
