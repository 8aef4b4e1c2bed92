"""The action convention and what an episode refuses."""

import pickle

import numpy as np
import pytest

from simforcing.data import REAL, ActionConvention, open_dataset
from simforcing.errors import SimForcingError


def test_convention_survives_json_form():
    convention = ActionConvention("delta", "target", "tool", "euler_xyz", "closed_positive", (-1.0, 1.0), 15.0)
    assert ActionConvention.from_dict(convention.to_dict()) == convention
    assert convention.to_dict()["gripper_range"] == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"rotaton": "rotvec"}, "no key 'rotaton'; did you mean 'rotation'"),
        ({"rotation": "matrix"}, "rotation is 'matrix'; use one of rotvec, euler_xyz, quaternion"),
        ({"kind": "delta"}, "a delta needs relative_to"),
        ({"hz": 0}, "give a positive rate"),
        ({"gripper_range": [1, 0]}, "smaller value first"),
        ({"gripper_range": 1}, "give two numbers"),
    ],
)
def test_convention_refuses(stored, message):
    with pytest.raises(SimForcingError, match=message):
        ActionConvention.from_dict(stored)


def test_episode_frames_by_index_slice_and_all(dataset_path):
    episode = open_dataset(dataset_path)[1]
    every = episode.frames(REAL)
    assert every.shape == (9, 32, 48, 3) and every.dtype == np.uint8
    np.testing.assert_array_equal(episode.frames(REAL, [7, 0, 7]), every[[7, 0, 7]])
    np.testing.assert_array_equal(episode.frames(REAL, slice(2, 9, 3)), every[2:9:3])
    assert episode.frames(REAL, []).shape == (0, 32, 48, 3)


@pytest.mark.parametrize("indices", [[9], [-1], slice(0, 10), [0, 100]])
def test_episode_refuses_frames_outside(dataset_path, indices):
    episode = open_dataset(dataset_path)[1]
    with pytest.raises(SimForcingError, match=r"episode 1 of .*outside its frames 0 to 8"):
        episode.frames(REAL, indices)


def test_unknown_camera_names_the_nearest(dataset_path):
    episode = open_dataset(dataset_path)[0]
    with pytest.raises(SimForcingError, match=r"no camera 'observation\.image\.real'; did you mean '.*images\.real'"):
        episode.frames("observation.image.real")


def test_dataset_is_a_sequence(dataset_path):
    dataset = open_dataset(dataset_path)
    assert [episode.index for episode in dataset] == [0, 1, 2]
    assert dataset[-1].index == 2 and [e.index for e in dataset[1:]] == [1, 2]
    assert dataset.lengths == (20, 9, 14) and dataset.tasks == ("task 0", "task 1", "task 0")
    for error in (IndexError, SimForcingError):
        with pytest.raises(error, match="no episode 3, it has 3"):
            dataset[3]


def test_dataset_and_episode_can_be_sent_to_workers(dataset_path):
    dataset = open_dataset(dataset_path)
    copy = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(copy[1].frames(REAL, [3]), dataset[1].frames(REAL, [3]))


def test_changing_an_episode_does_not_change_the_dataset(dataset_path):
    dataset = open_dataset(dataset_path)
    before = dataset[0].state.copy()
    dataset[0].state[:] = 0
    np.testing.assert_array_equal(dataset[0].state, before)
