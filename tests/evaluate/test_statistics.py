import math

import numpy as np
import pytest

from simforcing.errors import SimForcingError
from simforcing.evaluate import statistics


def test_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        interval = statistics.bootstrap(rng.normal(3.0, 2.0, 40), 400, seed=trial)
        hits += interval["low"] <= 3.0 <= interval["high"]
    assert 0.90 <= hits / 300 <= 0.985


def test_interval_width_is_that_of_the_normal_theory():
    values = np.random.default_rng(1).normal(0, 1, 400)
    interval = statistics.bootstrap(values, 4000)
    assert interval["mean"] == pytest.approx(values.mean())
    assert (interval["high"] - interval["low"]) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.08)
    assert interval["clips"] == 400 and interval["missing"] == 0


def test_a_seed_repeats_and_another_does_not():
    values = np.random.default_rng(1).normal(0, 1, 30)
    assert statistics.bootstrap(values, seed=3) == statistics.bootstrap(values, seed=3)
    assert statistics.bootstrap(values, seed=3)["low"] != statistics.bootstrap(values, seed=4)["low"]


def test_clusters_widen_the_interval_of_clips_that_resemble_each_other():
    rng = np.random.default_rng(0)
    episodes = np.repeat(np.arange(20), 10)
    values = rng.normal(0, 1, 20)[episodes] + rng.normal(0, 0.1, 200)
    by_clip = statistics.bootstrap(values)
    by_episode = statistics.bootstrap(values, clusters=episodes)
    width = [i["high"] - i["low"] for i in (by_clip, by_episode)]
    assert by_clip["mean"] == by_episode["mean"] == pytest.approx(values.mean())
    assert 2.4 < width[1] / width[0] < 4.0  # sqrt(10) for clips that are alike


def test_cluster_ids_may_be_names_and_sizes_may_differ():
    values = [1.0, 1.0, 1.0, 5.0]
    interval = statistics.bootstrap(values, clusters=["a", "a", "a", "b"])
    assert interval["mean"] == 2.0
    assert (interval["low"], interval["high"]) == (1.0, 5.0)


def test_nan_is_left_out_and_counted():
    interval = statistics.bootstrap([1.0, math.nan, 3.0], clusters=[0, 1, 2])
    assert (interval["mean"], interval["clips"], interval["missing"]) == (2.0, 2, 1)


def test_one_clip_has_a_mean_and_no_interval():
    one = statistics.bootstrap([4.0, math.nan])
    assert one["mean"] == 4.0 and math.isnan(one["low"]) and math.isnan(one["high"])
    none = statistics.bootstrap([math.nan, math.nan])
    assert math.isnan(none["mean"]) and none["clips"] == 0 and none["missing"] == 2


def test_values_that_cannot_be_averaged_are_refused():
    with pytest.raises(SimForcingError, match="infinite for clip 1"):
        statistics.bootstrap([1.0, math.inf])
    with pytest.raises(SimForcingError, match="one value a clip"):
        statistics.bootstrap([])
    with pytest.raises(SimForcingError, match="2 ids for 3 clips"):
        statistics.bootstrap([1.0, 2.0, 3.0], clusters=[0, 1])


def test_paired_difference_has_the_sign_of_a_minus_b_and_is_narrower_than_either():
    rng = np.random.default_rng(0)
    b = rng.normal(20, 3, 50)
    a = b + 0.4 + rng.normal(0, 0.2, 50)
    difference = statistics.paired_difference(a, b, name_a="student", name_b="baseline", metric="psnr")
    assert difference["mean"] == pytest.approx((a - b).mean())
    assert 0 < difference["low"] < difference["mean"] < difference["high"]
    assert (difference["name"], difference["metric"]) == ("student - baseline", "psnr")
    assert difference["high"] - difference["low"] < 0.2
    opposite = statistics.paired_difference(b, a)
    assert opposite["high"] < 0 and opposite["mean"] == pytest.approx(-difference["mean"])


def test_a_pair_counts_where_both_are_defined():
    difference = statistics.paired_difference([1.0, math.nan, 3.0], [0.0, 0.0, math.nan])
    assert (difference["mean"], difference["clips"], difference["missing"]) == (1.0, 1, 2)
    with pytest.raises(SimForcingError, match="2 of x, 3 of y"):
        statistics.paired_difference([1, 2], [1, 2, 3], name_a="x", name_b="y")


def test_ratio_is_of_means_and_resampled_together():
    rng = np.random.default_rng(0)
    b = rng.uniform(0.1, 2.0, 60)
    ratio = statistics.paired_ratio(2 * b, b)
    assert [ratio[k] for k in ("mean", "low", "high")] == pytest.approx([2, 2, 2])
    noisy = statistics.paired_ratio(2 * b + rng.normal(0, 0.3, 60), b)
    assert noisy["low"] < 2 < noisy["high"]
    with pytest.raises(SimForcingError, match="denominator is zero"):
        statistics.paired_ratio([1.0, 2.0], [0.0, 0.0])


def test_a_ratio_over_seeds_is_that_of_one_seed_and_widens_with_more():
    rng = np.random.default_rng(0)
    b = rng.uniform(0.1, 2.0, 60)
    a = 2 * b + rng.normal(0, 0.3, 60)
    one, alone = statistics.ratio_over_seeds(a[None], b[None]), statistics.paired_ratio(a, b)
    assert one["mean"] == alone["mean"] and one["low"] == pytest.approx(alone["low"], abs=0.02)
    exact = statistics.ratio_over_seeds(np.stack([2 * b, 2 * b]), np.stack([b, b]))
    assert [exact[k] for k in ("mean", "low", "high")] == pytest.approx([2, 2, 2])
    apart = statistics.ratio_over_seeds(np.stack([2 * b, 4 * b]), np.stack([b, b]))
    assert [apart[k] for k in ("mean", "low", "high")] == pytest.approx([3, 2, 4])
    with pytest.raises(SimForcingError, match="same seeds and clips"):
        statistics.ratio_over_seeds(a[None], np.stack([b, b]))
    with pytest.raises(SimForcingError, match="denominator is zero"):
        statistics.ratio_over_seeds(np.ones((2, 3)), np.zeros((2, 3)))


def test_columns_give_an_interval_each():
    table = np.random.default_rng(0).normal([1.0, 5.0], 0.1, (30, 2))
    intervals = statistics.bootstrap_columns(table)
    assert [round(i["mean"]) for i in intervals] == [1, 5]
    assert intervals[0] == statistics.bootstrap(table[:, 0])
    with pytest.raises(SimForcingError, match="one row a clip"):
        statistics.bootstrap_columns(table[0])


def test_one_seed_says_what_a_bootstrap_of_its_clips_says():
    values, episodes = np.random.default_rng(0).normal(size=12), np.repeat(np.arange(6), 2)
    assert statistics.over_seeds(values[None], clusters=episodes) == statistics.bootstrap(values, clusters=episodes)


def test_seeds_that_differ_widen_the_interval():
    values = np.random.default_rng(0).normal(size=30)
    alike, apart = np.stack([values] * 3), np.stack([values - 2, values, values + 2])
    one, two = statistics.over_seeds(alike), statistics.over_seeds(apart)
    assert one["mean"] == pytest.approx(two["mean"])
    assert two["high"] - two["low"] > 2 * (one["high"] - one["low"])
    assert two["clips"] == 30


def test_a_clip_that_is_missing_under_one_seed_is_left_out():
    table = np.ones((2, 5))
    table[1, 3] = np.nan
    found = statistics.over_seeds(table)
    assert (found["clips"], found["missing"], found["mean"]) == (4, 1, 1)
    with pytest.raises(SimForcingError, match="one row a seed"):
        statistics.over_seeds(np.ones(3))


def test_differences_pair_the_clips_and_not_the_seeds():
    rng = np.random.default_rng(0)
    clips = rng.normal(scale=10, size=40)  # clips differ much, methods little
    a, b = clips + 1 + rng.normal(scale=0.1, size=(3, 40)), clips + rng.normal(scale=0.1, size=(2, 40))
    found = statistics.difference_over_seeds(a, b, name_a="x", name_b="y", metric="psnr")
    assert found["name"] == "x - y" and found["low"] > 0.8 and found["high"] < 1.2
    assert found["mean"] == pytest.approx(float((a.mean(0) - b.mean(0)).mean()))
    assert found["p"] < 0.001
    back = statistics.difference_over_seeds(b, a)
    assert back["mean"] == pytest.approx(-found["mean"])
    with pytest.raises(SimForcingError, match="40 of a, 39 of b"):
        statistics.difference_over_seeds(a, b[:, :39])


def test_the_paired_test_counts_flips():
    assert statistics.paired_test([1, 2, 3], [0, 0, 0]) == 2 / 8  # all three agree: this outcome and its mirror
    assert statistics.paired_test([1, -1], [0, 0]) == 1
    assert statistics.paired_test([1, 1, 1, 1], [0, 0, 0, 0], clusters=[0, 0, 1, 1]) == 2 / 4  # two episodes
    many = np.random.default_rng(0).normal(1, 1, 40)
    assert statistics.paired_test(many, np.zeros(40)) == pytest.approx(1 / 5001, rel=1e-9)
    assert np.isnan(statistics.paired_test([np.nan], [1.0]))


def test_the_paired_test_is_fair_where_nothing_differs():
    rng = np.random.default_rng(0)
    found = [statistics.paired_test(rng.normal(size=10), np.zeros(10)) for _ in range(200)]
    assert 0.02 < np.mean(np.array(found) < 0.1) < 0.19
