"""Operations of a step, counted."""

import pytest

from simforcing.recipes import named
from simforcing.train import work
from simforcing.train.memory import Memory


def test_the_papers_forward_is_what_its_layers_add_up_to() -> None:
    found = work.forward(Memory(named("bridge-wan5b"), gpus=8))
    assert found == pytest.approx(2 * 30 * (65e9 + 1.4e9), rel=0.02)  # multiply-adds a layer: video, action


def test_a_students_pair_is_three_forwards_of_both_clips_and_one_of_the_teacher() -> None:
    need = Memory(named("small"))  # two equal shares
    count = work.training(need)
    forward, conditioned = count["a clip forward"], work.forward(need, with_simulation=True)
    assert forward < conditioned < 1.02 * forward  # one projection a block
    assert count["a clip of a teacher or baseline"] == 3 * forward
    assert count["a pair of a student"] == 3 * (conditioned + forward) + forward
    assert count["a pair, blocks recomputed"] - count["a pair of a student"] == conditioned + forward


def test_encoding_counts_the_window_of_both_domains() -> None:
    need = Memory(named("demo"))
    one = work.encoding(need)
    assert one > 0 and one % 2 == 0
    assert work.encoding(Memory(named("bridge-wan5b"))) > 1000 * one
