"""TFRecord and tf.train.Example: known checksums, round trips through an encoder written here, damage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simforcing.data.tfrecord import crc32c, parse_example, records
from simforcing.errors import SimForcingError


def test_checksums_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@given(st.binary(max_size=2000))
def test_checksum_equals_bit_by_bit(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF


@given(
    st.lists(st.binary(max_size=40), max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), max_size=6),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6),
    st.booleans(),
)
def test_example_round_trip(tfrecord, texts, floats, integers, packed):
    given_ = {"a/b": texts, "f": np.array(floats, np.float32), "i": np.array(integers, np.int64)}
    found = parse_example(tfrecord.example(given_, packed))
    assert found["a/b"] == texts
    np.testing.assert_array_equal(np.asarray(found["f"], np.float32), given_["f"])
    np.testing.assert_array_equal(np.asarray(found["i"], np.int64), given_["i"])


@given(st.binary(max_size=60))
def test_bytes_that_are_no_example_end_in_one_error(data):
    try:
        parse_example(data)
    except SimForcingError as error:
        assert "no tf.train.Example" in str(error)


def test_real_records_are_read_and_sound(shared):
    path = shared / "data/bridge_rlds/bridge_dataset-train.tfrecord-00000-of-00001"
    found = list(records(path))
    assert len(found) == 25
    data = found[3].read()
    assert set(found[3].peek()) == set(parse_example(data))


def test_a_peek_leaves_long_strings_out(tfrecord, tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(tfrecord.record(tfrecord.example({"long": [bytes(5000), b"x"], "n": np.arange(3)})))
    (one,) = records(path)
    found = one.peek()
    assert found["long"] == [b"", b"x"] and found["n"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-9], "record 1 of .*: the file is cut short"),
        (lambda b: b[:5], "record 0 of .*: the file is cut short"),
        (lambda b: b"", "zero bytes"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\n" + b, "only a pointer"),
        (lambda b: b"x" + b, "record 0 of .*: its length does not match the checksum"),
        (lambda b: b[:20] + bytes([b[20] ^ 1]) + b[21:], "record 0 of .*: data do not match their checksum"),
    ],
)
def test_damage_is_found(tfrecord, tmp_path, damage, message):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(damage(tfrecord.record(b"some data, some more") + tfrecord.record(b"second")))
    with pytest.raises(SimForcingError, match=message):
        [one.read() for one in records(path)]


def test_missing_file(tmp_path):
    with pytest.raises(SimForcingError, match="file is missing"):
        list(records(tmp_path / "none.tfrecord"))
