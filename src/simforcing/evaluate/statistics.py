"""Intervals and paired tests for numbers measured on held-out clips.

Shapes: B clips, K clusters (episodes), S R seeds (repeated trainings or noises). Every interval is a percentile
bootstrap at 95 %: clips are drawn with replacement, or whole episodes where ``clusters`` is given, because clips of one
episode resemble each other and intervals over clips would be too narrow. The statistic is always the mean over clips.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import numpy as np
from jaxtyping import Float64, Int64

from simforcing.errors import SimForcingError

Values: TypeAlias = Float64[np.ndarray, " B"] | Sequence[float]
Clusters: TypeAlias = Sequence[int] | Sequence[str] | Int64[np.ndarray, " B"]

LEVEL = 0.95


class Interval(TypedDict):
    """A mean with its 95 % interval; ``clips`` were used, ``missing`` were nan (not defined on them)."""

    mean: float
    low: float
    high: float
    clips: int
    missing: int


class Difference(Interval):
    """Mean of a - b over the same clips; ``name`` reads "a - b"; ``p`` comes from `paired_test`."""

    name: str
    metric: str
    a: str
    b: str
    p: float


def bootstrap(values: Values, n: int = 2000, seed: int = 0, *, clusters: Clusters | None = None) -> Interval:
    """Mean over clips with a 95 % percentile interval from ``n`` resamples.

    nan values are left out and counted in ``missing``. With ``clusters`` (one id a clip, its episode) whole
    clusters are resampled. Fewer than two usable clips or clusters say nothing about spread: low and high
    are nan then (and the mean too, without any). Raises `SimForcingError` for no values, infinite ones, or
    ids of another length.
    """
    array = _column("values", values)
    usable = ~np.isnan(array)
    draws = _resampled_sums(array[usable, None], _select(clusters, usable), n, seed)
    mean = float(array[usable].mean()) if usable.any() else float("nan")
    return _interval(mean, None if draws is None else draws[0][:, 0] / draws[1], usable)


def paired_difference(
    a: Values,
    b: Values,
    n: int = 2000,
    seed: int = 0,
    *,
    name_a: str = "a",
    name_b: str = "b",
    metric: str = "",
    clusters: Clusters | None = None,
) -> Difference:
    """`bootstrap` of a - b, clip by clip: positive where ``a`` is larger.

    A clip on which either is nan is left out. Raises `SimForcingError` for different numbers of clips.
    """
    first, second = _column(name_a, a), _column(name_b, b)
    if len(first) != len(second):
        raise SimForcingError(
            f"a paired difference needs the same clips: {len(first)} of {name_a}, {len(second)} of {name_b}"
        )
    interval = bootstrap(first - second, n, seed, clusters=clusters)
    p = paired_test(first, second, seed=seed, clusters=clusters)
    return Difference(name=f"{name_a} - {name_b}", metric=metric, a=name_a, b=name_b, p=p, **interval)


def paired_ratio(a: Values, b: Values, n: int = 2000, seed: int = 0, *, clusters: Clusters | None = None) -> Interval:
    """Mean of ``a`` divided by mean of ``b`` over the same clips, both resampled together.

    The action ratio is ``paired_ratio(error with exchanged actions, error with the true ones)``.
    """
    first, second = _column("a", a), _column("b", b)
    if len(first) != len(second):
        raise SimForcingError(f"a paired ratio needs the same clips: {len(first)} against {len(second)}")
    return ratio_over_seeds(first[None], second[None], n, seed, clusters=clusters)


def over_seeds(
    values: Float64[np.ndarray, "S B"], n: int = 2000, seed: int = 0, *, clusters: Clusters | None = None
) -> Interval:
    """Mean over seeds and clips; each resample draws seeds and, crossed with them, clips (or whole episodes).

    One seed says nothing about the spread between seeds: the interval is `bootstrap`'s then. A clip that is nan under
    any seed is left out. ``clips`` counts clips, not clips times seeds.
    """
    table = _table("values", values)
    usable = ~np.isnan(table).any(0)
    draws = _crossed(table[:, usable], _select(clusters, usable), n, np.random.default_rng(seed))
    mean = float(table[:, usable].mean()) if usable.any() else float("nan")
    return _interval(mean, draws, usable)


def ratio_over_seeds(
    a: Float64[np.ndarray, "S B"],
    b: Float64[np.ndarray, "S B"],
    n: int = 2000,
    seed: int = 0,
    *,
    clusters: Clusters | None = None,
) -> Interval:
    """Mean of ``a`` divided by mean of ``b``: the same seeds and the same clips, each resampled together; see
    `paired_ratio`.
    """
    first, second = _table("a", a), _table("b", b)
    if first.shape != second.shape:
        raise SimForcingError(f"a ratio needs the same seeds and clips: {first.shape} against {second.shape}")
    usable = ~(np.isnan(first).any(0) | np.isnan(second).any(0))
    first, second, groups = first[:, usable], second[:, usable], _select(clusters, usable)
    if usable.any() and second.mean() == 0:
        raise SimForcingError("the ratio's denominator is zero on average; it is not defined")
    above, below = (_crossed(t, groups, n, np.random.default_rng(seed)) for t in (first, second))
    mean = float(first.mean() / second.mean()) if usable.any() else float("nan")
    return _interval(mean, None if above is None or below is None else above / below, usable)


def difference_over_seeds(
    a: Float64[np.ndarray, "S B"],
    b: Float64[np.ndarray, "R B"],
    n: int = 2000,
    seed: int = 0,
    *,
    name_a: str = "a",
    name_b: str = "b",
    metric: str = "",
    clusters: Clusters | None = None,
) -> Difference:
    """a - b over the same clips, each with its own seeds: clips are resampled together, seeds of each by themselves.

    Its ``p`` is `paired_test`'s on the means over seeds. Raises `SimForcingError` for different numbers of clips.
    """
    first, second = _table(name_a, a), _table(name_b, b)
    if first.shape[1] != second.shape[1]:
        raise SimForcingError(
            f"a paired difference needs the same clips: {first.shape[1]} of {name_a}, {second.shape[1]} of {name_b}"
        )
    usable = ~(np.isnan(first).any(0) | np.isnan(second).any(0))
    first, second = first[:, usable], second[:, usable]
    groups = _select(clusters, usable)
    # The same generator state draws the same clips for both; their seeds come from streams of their own.
    sides = [_crossed(t, groups, n, np.random.default_rng(seed), i) for i, t in enumerate((first, second))]
    draws = None if sides[0] is None or sides[1] is None else sides[0] - sides[1]
    gap = first.mean(0) - second.mean(0)
    mean = float(gap.mean()) if usable.any() else float("nan")
    p = paired_test(gap, np.zeros_like(gap), clusters=groups.tolist(), seed=seed) if usable.any() else float("nan")
    interval = _interval(mean, draws, usable)
    return Difference(name=f"{name_a} - {name_b}", metric=metric, a=name_a, b=name_b, p=p, **interval)


def paired_test(a: Values, b: Values, n: int = 5000, seed: int = 0, *, clusters: Clusters | None = None) -> float:
    """Two-sided p of "a and b are the same": signs of whole clusters' differences flipped at random.

    The statistic is the mean difference over clips. Up to 12 clusters all flips are tried, so with K clusters no p is
    below 2 / 2^K; beyond, ``n`` random ones, counted with the one observed. nan where nothing is left to compare.
    """
    gap = _column("a", a) - _column("b", b)
    usable = ~np.isnan(gap)
    groups = _select(clusters, usable)
    if not usable.any():
        return float("nan")
    sums = np.bincount(groups, weights=gap[usable])
    k = len(sums)
    if k <= 12:
        flips = 1 - 2.0 * ((np.arange(2**k)[:, None] >> np.arange(k)) & 1)
    else:
        drawn = np.random.default_rng(seed).integers(0, 2, size=(n, k))
        flips = np.concatenate([np.ones((1, k)), 1 - 2.0 * drawn])
    return float((np.abs(flips @ sums) >= np.abs(sums.sum()) * (1 - 1e-9)).mean())


def bootstrap_columns(
    values: Float64[np.ndarray, "B S"], n: int = 2000, seed: int = 0, *, clusters: Clusters | None = None
) -> list[Interval]:
    """`bootstrap` of each column, e.g. of `metrics.psnr_by_frame`: one interval a frame index."""
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2:
        raise SimForcingError(f"expected one row a clip and one column a frame, got shape {list(table.shape)}")
    return [bootstrap(table[:, s], n, seed, clusters=clusters) for s in range(table.shape[1])]


def _table(name: str, values: Float64[np.ndarray, "S B"]) -> Float64[np.ndarray, "S B"]:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise SimForcingError(f"{name}: expected one row a seed and one column a clip, got shape {list(table.shape)}")
    if np.isinf(table).any():
        raise SimForcingError(
            f"{name}: infinite for clip {int(np.argmax(np.isinf(table).any(0)))}; cap it or mark it nan"
        )
    return table


def _crossed(
    table: Float64[np.ndarray, "S B"], cluster: Int64[np.ndarray, " B"], n: int, rng: np.random.Generator, side: int = 0
) -> Float64[np.ndarray, " n"] | None:
    """Means of resamples of clusters crossed with seeds; None with fewer than two clusters."""
    count = np.bincount(cluster)
    if n < 1:
        raise SimForcingError(f"a bootstrap needs at least one resample, got n={n}")
    if len(count) < 2:
        return None
    sums = np.stack([np.bincount(cluster, weights=row) for row in table])
    drawn = rng.integers(len(count), size=(n, len(count)))
    seeds = len(sums)
    chosen = rng.spawn(2)[side].integers(seeds, size=(n, seeds))
    rows = np.stack([s[drawn].sum(1) for s in sums])
    clips = count[drawn].sum(1)
    means: Float64[np.ndarray, " n"] = rows[chosen, np.arange(n)[:, None]].mean(1) / clips
    return means


def _column(name: str, values: Values) -> Float64[np.ndarray, " B"]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise SimForcingError(f"{name}: expected one value a clip, got shape {list(array.shape)}")
    if np.isinf(array).any():
        raise SimForcingError(f"{name}: infinite for clip {int(np.argmax(np.isinf(array)))}; cap it or mark it nan")
    return array


def _select(clusters: Clusters | None, usable: np.ndarray) -> Int64[np.ndarray, " B"]:
    """Cluster index of every usable clip; each clip is its own cluster where none are given."""
    if clusters is None:
        return np.arange(int(usable.sum()), dtype=np.int64)
    ids = np.asarray(clusters)
    if ids.shape != usable.shape:
        raise SimForcingError(f"clusters: {ids.size} ids for {usable.size} clips; give one a clip")
    _, index = np.unique(ids[usable], return_inverse=True)
    return index.astype(np.int64)


def _resampled_sums(
    values: Float64[np.ndarray, "B C"], cluster: Int64[np.ndarray, " B"], n: int, seed: int
) -> tuple[Float64[np.ndarray, "n C"], Float64[np.ndarray, " n"]] | None:
    """Sums of each column and number of clips in each resample; None with fewer than two clusters."""
    if n < 1:
        raise SimForcingError(f"a bootstrap needs at least one resample, got n={n}")
    count = np.bincount(cluster)
    clusters = len(count)
    if clusters < 2:
        return None
    sums = np.stack([np.bincount(cluster, weights=column) for column in values.T], axis=1)
    drawn = np.random.default_rng(seed).integers(clusters, size=(n, clusters))
    return sums[drawn].sum(axis=1), count[drawn].sum(axis=1).astype(np.float64)


def _interval(mean: float, draws: np.ndarray | None, usable: np.ndarray) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = (float("nan"),) * 2 if draws is None else np.quantile(draws, [tail, 1 - tail])
    clips = int(usable.sum())
    return Interval(mean=mean, low=float(low), high=float(high), clips=clips, missing=usable.size - clips)
