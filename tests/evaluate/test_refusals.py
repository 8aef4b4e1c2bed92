"""Damaged sweeps and links, names of cells, and protocols of one teacher under two names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simforcing.errors import SimForcingError
from simforcing.evaluate.protocol import Protocol, check_same
from simforcing.evaluate.report.collect import find
from simforcing.evaluate.sweep import FORMAT, Cell, Setting, Sweep, cell_name


def cell(w: float) -> Cell:
    return Cell(Setting(None, w, 1, 10), 0, 0)


@pytest.mark.parametrize(("w", "name"), [(0.5, "w0.5"), (0, "w0"), (0.0, "w0"), (1, "w1"), (1.0, "w1")])
def test_ordinary_weights_keep_their_names(w: float, name: str) -> None:
    assert cell_name(cell(w)) == f"m0-{name}-sim1-real10-seed0"


@given(*[st.floats(allow_nan=False, allow_infinity=False)] * 2)
def test_no_two_weights_share_a_name(a: float, b: float) -> None:
    assert (cell_name(cell(a)) == cell_name(cell(b))) == (a == b) or a == b == 0


def test_weights_that_agree_in_six_digits_differ_in_name() -> None:
    assert cell_name(cell(0.1234567)) != cell_name(cell(0.1234568))


GOOD = {"retention": None, "w": 0.5, "sim_steps": 1, "real_steps": 1}


@pytest.mark.parametrize(
    "stored",
    [
        [],
        {},
        {"format": FORMAT},
        {"format": FORMAT, "kind": "steps", "about": {}},
        *(
            {"format": FORMAT, "kind": "steps", "about": {}, "cells": cells}
            for cells in (
                {},
                [],
                [{}],
                [1],
                [{"setting": GOOD}],
                [{"setting": {}, "file": "a.json"}],
                [{"setting": GOOD | {"w": "a"}, "file": "a.json"}],
                [{"setting": GOOD, "file": 3}],
                [{"setting": GOOD, "file": "../a.json"}],
                [{"setting": GOOD | {"real_steps": None}, "file": "a.json"}],
            )
        ),
        {"format": FORMAT, "kind": 3, "about": {}, "cells": [{"setting": GOOD, "file": "a.json"}]},
        {"format": FORMAT, "kind": "steps", "about": [], "cells": [{"setting": GOOD, "file": "a.json"}]},
    ],
)
def test_a_damaged_sweep_is_named_in_one_line(stored: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    with pytest.raises(SimForcingError, match=r"sweep\.json") as caught:
        Sweep.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.json", "sweep.json", "log.jsonl"])
def test_a_link_that_leads_nowhere_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(SimForcingError, match=f"{name}: a link that leads nowhere"):
        find(tmp_path)


def test_a_teacher_is_its_weights_not_its_name() -> None:
    one = Protocol("s", "c", 1, 5, 5.0, 8, 8, simulation="bundled-teacher", simulator_sha256="a")
    check_same({"one": one, "same": replace(one, simulation="models/teacher")})
    with pytest.raises(SimForcingError, match="simulator_sha256"):
        check_same({"one": one, "other": replace(one, simulator_sha256="b")})
