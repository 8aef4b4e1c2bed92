"""The served policy: openpi's messages, bad observations, garbage, limits."""

import asyncio
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from simforcing.cli.policy_serve import PolicyServe
from simforcing.errors import InputError, SimForcingError
from simforcing.policy.libero_numbers import from_recording
from simforcing.policy.serve import Colours, PolicyServer, Served, pack, short, unpack

CAMERAS = {"observation.images.image": (32, 32), "observation.images.wrist_image": (32, 32)}


class Toy:
    """Actions that say what was seen: the mean of each camera, the state's sum, the words' length, the seed."""

    def __init__(self) -> None:
        self.noise: list[int] = []
        self.answer: np.ndarray | None = None

    def act(
        self,
        images: Mapping[str, np.ndarray],
        state: np.ndarray,
        instruction: Sequence[str],
        seed: int | Sequence[int] = 0,
        steps: int = 10,
    ) -> np.ndarray:
        assert isinstance(seed, int)
        self.noise.append(seed)
        if self.answer is not None:
            return self.answer
        row = [*(view.mean() for view in images.values()), state.sum(), len(instruction[0]), seed % 100, steps, 1.0]
        return np.tile(np.array(row, np.float32), (1, 4, 1))


Answer = Callable[[Any], Any]


class Running:
    """A server in a thread of its own."""

    def __init__(self, served: Served, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.port: Future[int] = Future()
        self.thread = threading.Thread(target=self._run, args=(served, options), daemon=True)
        self.thread.start()
        self.port.result(10)

    def _run(self, served: Served, options: dict[str, Any]) -> None:
        async def serve() -> None:
            self.stop = asyncio.Event()
            async with await PolicyServer(served, **options).start(port=0) as server:
                self.port.set_result(next(iter(server.sockets)).getsockname()[1])
                await self.stop.wait()

        self.loop.run_until_complete(serve())

    def client(self) -> ClientConnection:
        return connect(f"ws://127.0.0.1:{self.port.result()}", compression=None, max_size=None)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)
        assert not self.thread.is_alive()


def served(toy: Toy, **changes: Any) -> Served:
    return Served(**{"policy": toy, "cameras": CAMERAS, "state": 8, "horizon": 4, "action": 7, "seed": 42} | changes)


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def running() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*args: Any, **options: Any) -> Running:
        started.append(Running(*args, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


def observation(**changes: Any) -> dict[str, Any]:
    found = {
        "observation/image": np.full((32, 32, 3), 10, np.uint8),
        "observation/wrist_image": np.full((32, 32, 3), 20, np.uint8),
        "observation/state": np.arange(8, dtype=np.float64),
        "prompt": "pick up the milk",
    }
    found |= {f"observation/{key}" if key not in ("prompt", "seed") else key: value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def test_a_conversation(toy: Toy, running: Callable[..., Running]) -> None:
    server = running(served(toy, about={"policy": "toy"}))
    with server.client() as client:
        said = unpack(client.recv())
        assert said["policy"] == "toy" and said["action_dim"] == 7 and said["action_horizon"] == 4
        assert said["cameras"] == {"observation/image": [32, 32], "observation/wrist_image": [32, 32]}
        client.send(pack(observation()))
        first = unpack(client.recv())
        np.testing.assert_array_equal(first["actions"], np.tile(np.float32([10, 20, 28, 16, 42, 10, 1]), (4, 1)))
        assert first["actions"].dtype == np.float32
        assert set(first["server_timing"]) == {"infer_ms"} and first["server_timing"]["infer_ms"] >= 0
        client.send(pack(observation(seed=7)))
        second = unpack(client.recv())
        assert second["actions"][0, 4] == 7 and second["server_timing"]["prev_total_ms"] > 0
        assert second["policy_timing"]["infer_ms"] <= second["server_timing"]["infer_ms"]


def test_health_and_address(toy: Toy, running: Callable[..., Running]) -> None:
    server = running(served(toy))
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port.result()}/healthz", timeout=10) as answer:
        assert answer.status == 200 and answer.read() == b"OK\n"
    with pytest.raises(SimForcingError, match=r"cannot listen on 127\.0\.0\.1"):
        asyncio.run(PolicyServer(served(toy)).start(port=server.port.result()))


def test_fresh_noise_and_libero_actions(toy: Toy) -> None:
    chunk = served(toy, convert=from_recording).answer(observation(), 5)
    assert (chunk[:, 6] == -1).all() and chunk[0, 0] == 10  # 1 is open in recordings, -1 in the environment


def test_fresh_noise(toy: Toy, running: Callable[..., Running]) -> None:
    with running(served(toy, fresh=True)).client() as client:
        client.recv()
        for _ in range(3):
            client.send(pack(observation()))
            client.recv()
    assert len(set(toy.noise)) == 3


BAD = {
    "image lacks": ({"image": None}, "lacks observation/image"),
    "two cameras lack": ({"image": None, "wrist_image": None}, "lacks observation/image, observation/wrist_image"),
    "unknown camera": ({"wrist": np.zeros((32, 32, 3), np.uint8)}, "unknown key 'wrist'; did you mean"),
    "floats": ({"image": np.zeros((32, 32, 3), np.float32)}, r"image is float32 \[32, 32, 3\], it must be uint8"),
    "channels first": ({"image": np.zeros((3, 32, 32), np.uint8)}, "channels come first"),
    "grey": ({"image": np.zeros((32, 32), np.uint8)}, r"image is uint8 \[32, 32\]"),
    "batched": ({"image": np.zeros((1, 32, 32, 3), np.uint8)}, r"image is uint8 \[1, 32, 32, 3\]"),
    "with alpha": ({"image": np.zeros((32, 32, 4), np.uint8)}, r"\[32, 32, 4\], it must be"),
    "other shape": ({"image": np.zeros((32, 48, 3), np.uint8)}, r"\[32, 48, 3\], it must be uint8 \[32, 32, 3\]"),
    "list": ({"image": [[0, 1], [2, 3]]}, "image is list"),
    "no state": ({"state": None}, "lacks observation/state"),
    "short state": ({"state": np.zeros(7)}, r"state has shape \[7\], it must be \[8\]"),
    "words as state": ({"state": ["a"] * 8}, "holds something else than 8 numbers"),
    "NaN": ({"state": np.array([0, 0, 0, np.nan, 0, 0, 0, 0])}, "NaN or infinite"),
    "no prompt": ({"prompt": None}, "lacks prompt"),
    "empty prompt": ({"prompt": "  "}, "give the instruction as text"),
    "number as prompt": ({"prompt": 3}, "prompt is 3"),
    "book as prompt": ({"prompt": "pick " * 500}, "prompt has 2500 characters; give at most 2000"),
    "seed": ({"seed": -1}, "seed is -1"),
    "seed of numpy": ({"seed": np.int64(-2)}, "seed is -2"),
}


def test_a_seed_of_numpy_is_one(toy: Toy) -> None:
    assert served(toy).read(observation(seed=np.int64(5)))[3] == 5


def test_every_error_is_answered_and_the_connection_stays(toy: Toy, running: Callable[..., Running]) -> None:
    with running(served(toy)).client() as client:
        client.recv()
        for name, (changes, message) in BAD.items():
            client.send(pack(observation(**changes)))
            said = client.recv()
            assert isinstance(said, str) and "\n" not in said, name
            with pytest.raises(InputError, match=message):
                served(toy).read(observation(**changes))
        for garbage in (
            b"",
            b"\xc1",
            b"\x00garbage",
            msgpack.packb([1, 2]),
            msgpack.packb({"a": {b"__ndarray__": True}}),
            msgpack.packb({"a": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}}),
            msgpack.packb({"a": {b"__npgeneric__": True, b"data": float("inf"), b"dtype": "<i8"}}),
        ):
            client.send(garbage)
            assert isinstance(client.recv(), str)
        client.send("text")
        assert "binary message" in str(client.recv())
        client.send(pack(observation()))
        assert unpack(client.recv())["actions"].shape == (4, 7)


def test_a_policy_that_answers_nonsense(toy: Toy) -> None:
    toy.answer = np.full((1, 4, 7), np.nan, np.float32)
    with pytest.raises(SimForcingError, match="NaN or infinite"):
        served(toy).answer(observation(), 0)
    toy.answer = np.zeros((1, 4, 8), np.float32)
    with pytest.raises(SimForcingError, match="actions have 8 numbers, its description 7"):
        served(toy).answer(observation(), 0)


def test_a_policy_that_breaks_is_told_and_the_connection_stays(
    toy: Toy, running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(served(toy)).client() as client:
        client.recv()
        with monkeypatch.context() as broken:
            broken.setattr(Toy, "act", lambda *args: {}["codec"])
            client.send(pack(observation()))
            assert client.recv() == "the policy failed (KeyError); the server's log says more"
        client.send(pack(observation()))
        assert unpack(client.recv())["actions"].shape == (4, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 99999}, "--port 99999: give 0 to 65535"),
        ({"max_mb": float("nan")}, "--max-mb nan: give more than 0"),
        ({"max_mb": float("inf")}, "--max-mb inf: give more than 0"),
    ],
)
def test_options_that_no_server_can_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SimForcingError, match=message):
        PolicyServe(checkpoint=Path("p"), **changes).run()


def test_limits(toy: Toy, running: Callable[..., Running]) -> None:
    server = running(served(toy), limit=4096, connections=1)
    with server.client() as client:
        client.recv()
        with server.client() as another, pytest.raises(ConnectionClosed) as closed:
            another.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        with pytest.raises(ConnectionClosed) as closed:
            client.send(bytes(8192))
            client.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
    with server.client() as client:  # the server goes on
        assert unpack(client.recv())["action_dim"] == 7
    with pytest.raises(SimForcingError, match="limits of 1 bytes"):
        PolicyServer(served(toy), limit=1)


def test_a_client_that_leaves_in_the_middle(toy: Toy, running: Callable[..., Running]) -> None:
    server = running(served(toy))
    with socket.create_connection(("127.0.0.1", server.port.result())) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nnonsense")
    with server.client() as client:
        client.recv()
        client.send(pack(observation()))
        client.socket.shutdown(socket.SHUT_RDWR)
    with server.client() as client:
        client.recv()
        client.send(pack(observation()))
        assert unpack(client.recv())["actions"].shape == (4, 7)


def test_exchanged_colours() -> None:
    colours = Colours(np.array([0.6, 0.4, 0.2]), np.array([0.05, 0.05, 0.05]))
    picture = np.zeros((8, 8, 3), np.uint8) + np.uint8([153, 102, 51])
    colours.check("image", picture)
    colours.check("image", picture // 2)  # darker, but not exchanged
    with pytest.raises(InputError, match="red and blue exchanged; send RGB"):
        colours.check("image", picture[..., ::-1])


def test_names_of_cameras() -> None:
    names = ("observation/wrist_image", "observation.images.wrist_image", "observation/images/wrist_image")
    assert {short(name) for name in names} == {"wrist_image"}
    twice = observation() | {"observation.images.image": np.zeros((32, 32, 3), np.uint8)}
    with pytest.raises(InputError, match="says something twice"):
        served(Toy()).read(twice)


WORDS = st.text("aß語 /_", max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | WORDS | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_messages_and_back(value: Any) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("kind", ["u1", "<f4", "<f8", "<i8", "?", ">f4"])
def test_arrays_and_back(kind: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(kind)
    found = unpack(pack({"a": array, "b": array[0, 1]}))
    assert found["a"].dtype == array.dtype and found["b"] == array[0, 1]
    np.testing.assert_array_equal(found["a"], array)


ASKED = (
    "84b16f62736572766174696f6e2f696d61676584c40b5f5f6e6461727261795f5fc3c40464617461c40c000102030405060708090a0bc4"
    "056474797065a37c7531c405736861706593020203b16f62736572766174696f6e2f737461746584c40b5f5f6e6461727261795f5fc3c4"
    "0464617461c410000000000000e03f000000000000f0bfc4056474797065a33c6638c40573686170659102a670726f6d7074a47069636b"
    "a47365656483c40d5f5f6e7067656e657269635f5fc3c4046461746107c4056474797065a33c6938"
)
"""What openpi-client 0.1.2 makes of an observation with a picture of 0 to 11, state (0.5, -1), and seed np.int64(7)."""
ANSWERED = (
    "82a7616374696f6e7384c40b5f5f6e6461727261795f5fc3c4056474797065a33c6634c4057368617065920102c40464617461c4080000"
    "803f0000003fad7365727665725f74696d696e6781a8696e6665725f6d73cb3ff8000000000000"
)
"""What it reads as actions ((1, 0.5)) of float32 and a timing of 1.5 ms."""


def test_messages_are_those_of_openpis_client() -> None:
    """Bytes that its own functions made or read, so that a mistake in both of ours is seen."""
    found = unpack(bytes.fromhex(ASKED))
    assert list(found) == ["observation/image", "observation/state", "prompt", "seed"]
    np.testing.assert_array_equal(found["observation/image"], np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    np.testing.assert_array_equal(found["observation/state"], np.array([0.5, -1.0]))
    assert found["prompt"] == "pick" and found["seed"] == 7
    answer = {"actions": np.array([[1.0, 0.5]], np.float32), "server_timing": {"infer_ms": 1.5}}
    assert pack(answer) == bytes.fromhex(ANSWERED)


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=9)
KIND = st.sampled_from(["|u1", "<i8", "<f4", "|b1", "<U3", "|O", "x"]) | PLAIN
SHAPED = st.fixed_dictionaries({b"__ndarray__": PLAIN, b"dtype": KIND, b"shape": st.lists(PLAIN, max_size=3) | PLAIN,
                                b"data": PLAIN})  # fmt: skip
NUMBER = st.fixed_dictionaries({b"__npgeneric__": PLAIN, b"dtype": KIND, b"data": PLAIN})
MESSAGE = st.dictionaries(
    st.sampled_from(["observation/image", "observation/state", "prompt"]), SHAPED | NUMBER | PLAIN
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | MESSAGE.map(msgpack.packb))
def test_no_garbage_raises_anything_else(data: bytes) -> None:
    try:
        served(Toy()).read(unpack(data))
    except InputError as error:
        assert "\n" not in str(error)


def test_what_no_message_holds() -> None:
    with pytest.raises(InputError, match="cannot hold set"):
        pack({1, 2})
    for kind in (np.array([object()]), np.array([1j]), np.array("2020", "M8[Y]")):
        with pytest.raises(InputError, match="cannot hold ndarray"):
            pack(kind)
    bad = {b"__ndarray__": True, b"dtype": "<f4", b"shape": [2**40], b"data": b""}
    for change, message in (
        ({}, "has 0 bytes"),
        ({b"dtype": "O"}, "has type 'O'"),
        ({b"dtype": "junk"}, "has type 'junk'"),
        ({b"shape": [-1]}, "shape is"),
        ({b"data": None, b"shape": [1]}, "NoneType bytes"),
    ):
        with pytest.raises(InputError, match=message):
            unpack(msgpack.packb(bad | change))
