"""The min/max normaliser: values by hand, and its properties."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from simforcing.data.stats import Normalizer
from simforcing.errors import SimForcingError


def test_values_by_hand():
    normalizer = Normalizer.fit(np.array([[0.0, 5.0], [4.0, 5.00001]], np.float32))
    np.testing.assert_allclose(normalizer.scale, [0.5, 1.0])
    np.testing.assert_allclose(normalizer.offset, [-1.0, -5.0])
    np.testing.assert_allclose(normalizer.normalize(np.array([[1.0, 5.0], [100.0, -9.0]])), [[-0.5, 0], [5, -5]])


def test_several_episodes_equal_one_array():
    parts = [np.random.default_rng(i).normal(size=(n, 3)).astype(np.float32) for i, n in enumerate((4, 1, 9))]
    whole, split = Normalizer.fit(np.concatenate(parts)), Normalizer.fit(iter(parts))
    np.testing.assert_array_equal(whole.min, split.min)
    np.testing.assert_array_equal(whole.max, split.max)


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 20), st.integers(1, 8)),
        elements=st.floats(-100, 100, width=32),
    )
)
def test_round_trip_and_range(data):
    normalizer = Normalizer.from_dict(json.loads(json.dumps(Normalizer.fit(data).to_dict())))
    y = normalizer.normalize(data)
    assert np.abs(y).max() <= 1 + 1e-4 * np.abs(data).max() + 1e-5
    # one rounding of `offset`, in units of the data
    np.testing.assert_allclose(normalizer.denormalize(y), data, atol=1e-4)


def test_reads_a_released_entry():
    entry = {name: [0.0, 1.0] for name in ("min", "q01", "q99", "mean", "std")} | {"max": [2.0, 3.0]}
    np.testing.assert_array_equal(Normalizer.from_dict(entry).scale, [1, 1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.empty((0, 3)), "no rows"),
        (np.zeros(3), "give rows"),
        (np.array([[0, np.nan]]), "not finite in dimension 1"),
    ],
)
def test_fit_refuses(data, message):
    with pytest.raises(SimForcingError, match=message):
        Normalizer.fit(data)


def test_refuses_other_widths_and_kinds():
    with pytest.raises(SimForcingError, match="normaliser of width 2"):
        Normalizer.fit(np.zeros((3, 2))).normalize(np.zeros((4, 3)))
    with pytest.raises(SimForcingError, match="kind 'z_score'"):
        Normalizer.from_dict({"kind": "z_score", "mean": [0], "std": [1]})
    with pytest.raises(SimForcingError, match="min <= max"):
        Normalizer(np.ones(2), np.zeros(2))
