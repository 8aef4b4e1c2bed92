"""A policy behind the openpi websocket protocol: an observation comes as one message, a chunk of actions goes back.

Legend: H W pixels, A action steps, a action numbers, p state numbers.

Messages are msgpack with openpi's extension for NumPy. The first one goes to the client and describes the policy; then
each observation (`observation/<camera>`, `observation/state`, `prompt`, and `seed` where noise is to be chosen) is
answered with `actions`, `server_timing` and `policy_timing`, or with a text that says what is wrong with it, which the
client raises. Whatever comes, the connection stays open; only a message above the size limit closes it, by the
websocket protocol's own code. `/healthz` answers while a policy thinks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import msgpack
import numpy as np
from jaxtyping import Float, Float32, UInt8
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from simforcing.data.episode import nearest
from simforcing.errors import InputError, SimForcingError

Array = np.ndarray[Any, np.dtype[Any]]
LOG = logging.getLogger(__name__)
IMAGES = "observation.images."
KINDS = "biuf"
"""Kinds of NumPy types that a message may hold: truth values and real numbers."""
LONGEST_PROMPT = 2000
"""Characters of an instruction."""


class Acts(Protocol):
    """What decides: see `simforcing.policy.policy.Policy.act`."""

    def act(
        self,
        images: Mapping[str, UInt8[Array, "B H W 3"]],
        state: Float[Array, "B p"],
        instruction: Sequence[str],
        seed: int | Sequence[int] = 0,
        steps: int = 10,
    ) -> Float32[Array, "B A a"]:
        """Actions in the recordings' units."""


@dataclass(frozen=True)
class Colours:
    """Mean and spread of red, green and blue in the recordings of a camera, of values in [0, 1]."""

    mean: Float[Array, "3"]
    spread: Float[Array, "3"]

    def check(self, name: str, picture: UInt8[Array, "H W 3"]) -> None:
        """Raises InputError for a picture that is like the recordings only with red and blue exchanged."""
        found = picture.reshape(-1, 3).mean(0) / 255

        def unlikeness(colours: Float[Array, "3"]) -> float:
            return float(np.abs((colours - self.mean) / np.maximum(self.spread, 0.01)).sum())

        if unlikeness(found[::-1]) < 0.5 * unlikeness(found) and unlikeness(found) > 0.5:
            raise InputError(f"{name} looks like the recordings with red and blue exchanged; send RGB")


@dataclass(frozen=True)
class Served:
    """A policy, and what it is shown and answers.

    cameras: height and width of each in the recordings. convert: from the recordings' actions to what is answered.
    """

    policy: Acts
    cameras: Mapping[str, tuple[int, int]]
    state: int
    horizon: int
    action: int
    steps: int = 10
    seed: int = 0
    fresh: bool = False
    colours: Mapping[str, Colours] = field(default_factory=dict)
    convert: Callable[[Float32[Array, "A a"]], Float32[Array, "A a"]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """The server's first message."""
        cameras = {f"observation/{short(key)}": list(size) for key, size in self.cameras.items()}
        return {
            **self.about,
            "cameras": cameras,
            "state": self.state,
            "action_horizon": self.horizon,
            "action_dim": self.action,
            "keys": [*cameras, "observation/state", "prompt"],
        }

    def answer(self, message: Any, seed: int) -> Float32[Array, "A a"]:
        """Actions for one observation.

        Raises:
            SimForcingError: one line that says what is wrong with it, or with the policy's answer.
        """
        images, state, prompt, asked = self.read(message)
        noise = seed if asked is None else asked
        chunk = self.policy.act({k: v[None] for k, v in images.items()}, state[None], [prompt], noise, self.steps)[0]
        if chunk.shape[-1] != self.action:
            raise SimForcingError(f"the policy's actions have {chunk.shape[-1]} numbers, its description {self.action}")
        if not np.isfinite(chunk).all():
            raise SimForcingError("the policy's actions hold NaN or infinite values")
        return chunk if self.convert is None else self.convert(chunk)

    def read(self, message: Any) -> tuple[dict[str, UInt8[Array, "H W 3"]], Float32[Array, "p"], str, int | None]:
        """Images by camera, state, words and noise seed of an observation. Raises InputError for any other."""
        if not isinstance(message, dict):
            raise InputError(f"an observation is a mapping, this is {type(message).__name__}")
        given = {short(key) if isinstance(key, str) else key: value for key, value in message.items()}
        if len(given) < len(message):
            raise InputError(f"the observation says something twice: {', '.join(map(str, message))}")
        known = {short(key): key for key in self.cameras}
        for name in given:
            if name not in known and name not in ("state", "prompt", "seed"):
                hint = nearest(f"observation/{name}", [f"observation/{n}" for n in (*known, "state")] + ["prompt"])
                raise InputError(f"unknown key {name!r}; {hint}")
        missing = [f"observation/{name}" for name in (*known, "state") if name not in given]
        missing += [] if "prompt" in given else ["prompt"]
        if missing:
            raise InputError(f"the observation lacks {', '.join(missing)}")
        images = {key: self._picture(key, given[name]) for name, key in known.items()}
        prompt, seed = given["prompt"], given.get("seed")
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f"prompt is {prompt!r:.60}; give the instruction as text")
        if len(prompt) > LONGEST_PROMPT:
            raise InputError(f"prompt has {len(prompt)} characters; give at most {LONGEST_PROMPT}")
        if isinstance(seed, np.integer):
            seed = int(seed)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
            raise InputError(f"seed is {seed!r:.60}; give a whole number of at least 0")
        return images, self._state(given["state"]), prompt, seed

    def _picture(self, key: str, value: Any) -> UInt8[Array, "H W 3"]:
        name, (height, width) = f"observation/{short(key)}", self.cameras[key]
        kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        wanted = f"it must be uint8 [{height}, {width}, 3], RGB with the top row first"
        if not isinstance(value, np.ndarray) or value.ndim != 3:
            raise InputError(f"{name} is {kind}, {wanted}")
        if value.shape[0] == 3 and value.shape[2] != 3:
            raise InputError(f"{name} is {kind}: channels come first, {wanted}")
        if value.dtype != np.uint8 or value.shape[2] != 3:
            raise InputError(f"{name} is {kind}, {wanted}")
        if min(value.shape[:2]) < 8 or value.shape[0] * width != value.shape[1] * height:
            raise InputError(f"{name} is {kind}, {wanted} (or of another size of that shape)")
        if key in self.colours:
            self.colours[key].check(name, value)
        return value

    def _state(self, value: Any) -> Float32[Array, "p"]:
        if not isinstance(value, np.ndarray | list | tuple):
            raise InputError(f"observation/state is {type(value).__name__}, it must be {self.state} numbers")
        try:
            state = np.asarray(value, np.float32)
        except (TypeError, ValueError):
            raise InputError(f"observation/state holds something else than {self.state} numbers") from None
        if state.shape != (self.state,):
            raise InputError(f"observation/state has shape {list(state.shape)}, it must be [{self.state}]")
        if not np.isfinite(state).all():
            raise InputError("observation/state holds NaN or infinite values")
        return state


def short(key: str) -> str:
    """`observation/wrist_image`, `observation.images.wrist_image`: `wrist_image`."""
    return key.replace("/", ".").removeprefix("observation.").removeprefix("images.")


# -- messages ----------------------------------------------------------------------------------------------------------


def pack(message: Any) -> bytes:
    """A message as bytes; NumPy arrays and numbers as openpi's client reads them. Raises InputError for other types."""

    def encoded(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind in KINDS:
            head = {b"__ndarray__": True, b"dtype": value.dtype.str, b"shape": value.shape}
            return head | {b"data": value.tobytes()}
        if isinstance(value, np.generic) and value.dtype.kind in KINDS:
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        raise InputError(f"a message cannot hold {type(value).__name__}")

    packed: bytes = msgpack.packb(message, default=encoded)
    return packed


def unpack(data: bytes) -> Any:
    """Inverse of `pack`. Raises InputError for what is none."""

    def decoded(value: dict[Any, Any]) -> Any:
        if b"__ndarray__" in value:
            return _array(value)
        if b"__npgeneric__" in value:
            return _kind(value.get(b"dtype")).type(value.get(b"data"))
        return value

    try:
        return msgpack.unpackb(data, object_hook=decoded)
    except InputError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise InputError(
            f"the message is no msgpack ({' '.join(str(error).split()) or type(error).__name__})"
        ) from error


def _array(value: Mapping[Any, Any]) -> Array:
    kind, shape, data = _kind(value.get(b"dtype")), value.get(b"shape"), value.get(b"data")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 8:
        raise InputError(f"an array's shape is {shape!r:.60}; give a few whole numbers")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * kind.itemsize:
        found = len(data) if isinstance(data, bytes) else type(data).__name__
        raise InputError(f"an array of shape {shape} and type {kind} has {found} bytes")
    return np.frombuffer(data, kind).reshape(shape)


def _kind(name: Any) -> np.dtype[Any]:
    try:
        kind = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        kind = None
    if kind is None or kind.kind not in KINDS:
        raise InputError(f"an array has type {name!r:.60}; give truth values or real numbers")
    return kind


# -- the server --------------------------------------------------------------------------------------------------------


class PolicyServer:
    """Answers clients of one policy, one observation at a time; a context manager around a running event loop.

    limit: bytes of a message. connections: how many may be open.
    """

    def __init__(self, served: Served, limit: int = 16 * 1024 * 1024, connections: int = 16) -> None:
        if limit < 1024 or connections < 1:
            raise SimForcingError(f"limits of {limit} bytes and {connections} connections; give at least 1024, and 1")
        self.served, self.limit, self.connections = served, limit, connections
        self._thinking = ThreadPoolExecutor(1)
        self._open = self._chunks = 0

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> Server:
        """Listens; port 0 takes any that is free. Raises SimForcingError where that is not possible."""
        try:
            return await serve(
                self._serve,
                host,
                port,
                compression=None,
                max_size=self.limit,
                process_request=_health,
                ping_timeout=None,  # a client may be busy with a robot
            )
        except OSError as error:
            raise SimForcingError(f"cannot listen on {host}:{port} ({error.strerror or error})") from error

    async def _serve(self, client: ServerConnection) -> None:
        if self._open >= self.connections:
            await client.close(1013, f"{self.connections} clients are connected; try again later")
            return
        self._open += 1
        try:
            await client.send(pack(self.served.metadata()))
            before: float | None = None
            async for data in client:
                begun = time.monotonic()
                await client.send(await self._reply(data, begun, before))
                before = time.monotonic() - begun
        except ConnectionClosed:
            pass
        finally:
            self._open -= 1

    async def _reply(self, data: str | bytes, begun: float, before: float | None) -> str | bytes:
        """Actions as a message, or what is wrong as text."""
        try:
            if isinstance(data, str):
                raise InputError("a text came; send msgpack as a binary message")
            message, seed = unpack(data), self.served.seed
            if self.served.fresh:
                self._chunks += 1
                seed = int(np.random.SeedSequence([seed, self._chunks]).generate_state(1)[0])
            loop = asyncio.get_running_loop()
            thought = time.monotonic()
            actions = await loop.run_in_executor(self._thinking, self.served.answer, message, seed)
        except SimForcingError as error:
            return " ".join(str(error).split())
        except Exception as error:  # such as a device without memory: this client is told, the others are served
            LOG.exception("the policy failed")
            return f"the policy failed ({type(error).__name__}); the server's log says more"
        now = time.monotonic()
        timing = {"infer_ms": 1000 * (now - begun)}
        if before is not None:
            timing["prev_total_ms"] = 1000 * before
        return pack(
            {"actions": actions, "server_timing": timing, "policy_timing": {"infer_ms": 1000 * (now - thought)}}
        )


def _health(client: ServerConnection, request: Request) -> Response | None:
    """Answers `/healthz`; other requests go on to become websockets."""
    return client.respond(HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None
