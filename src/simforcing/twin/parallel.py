"""Work on many items at once: in this process, in processes of this machine, or on a Ray cluster.

A function that is handed out must be importable by name and its arguments must pickle.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import connection, get_context, parent_process
from types import TracebackType
from typing import Any, Literal, TypeVar

from simforcing.errors import SimForcingError

Engine = Literal["processes", "ray"]
Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 2  # items that a worker has waiting, so that it never idles


def _end_with_parent() -> None:
    """In a worker: exit as soon as the parent is gone, killed ones included, instead of waiting for work forever.

    Ctrl-C reaches the whole group of processes; it is the parent that answers it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh Python processes that end with this one, however it ends. What waits is dropped on errors."""
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()


class Workers:
    """Workers that apply functions to items; a context manager. They start when there is something to do.

    One worker of engine `processes` is this process. `ray` joins the running cluster, or starts one of `count`
    workers on this machine; `count` bounds what is under way at a time. Raises SimForcingError for a count below 1.
    """

    def __init__(self, count: int = 1, engine: Engine = "processes") -> None:
        if count < 1:
            raise SimForcingError(f"workers is {count}; give at least 1")
        self.count, self.engine = count, engine
        self._open = ExitStack()
        self._pool: ProcessPoolExecutor | None = None
        self._ray: Any = None

    @property
    def here(self) -> bool:
        """Whether the work is done in this process."""
        return self.count == 1 and self.engine == "processes"

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def each(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        """(item, function(item)) of every item, in the order in which they get done.

        Raises what the function raises, and SimForcingError where a worker dies or Ray is not installed.
        """
        waiting = iter(items)
        if self.here:
            for item in waiting:
                yield item, function(item)
            return
        running: dict[Any, Item] = {}
        while True:
            for item in waiting:
                running[self._submit(function, item)] = item
                if len(running) >= _AHEAD * self.count:
                    break
            if not running:
                return
            for done in self._wait(list(running)):
                yield running.pop(done), self._result(done)

    def _submit(self, function: Callable[[Item], Any], item: Item) -> Any:
        if self.engine == "ray":
            self._ray = self._ray or self._open.enter_context(_ray(self.count))
            return self._ray.remote(_call).remote(function, item)
        self._pool = self._pool or self._open.enter_context(process_pool(self.count))
        return self._pool.submit(function, item)

    def _wait(self, running: Sequence[Any]) -> Iterable[Any]:
        if self._ray is not None:
            return list(self._ray.wait(list(running), num_returns=1)[0])
        return wait(running, return_when=FIRST_COMPLETED).done

    def _result(self, done: Any) -> Any:
        if self._ray is None:
            try:
                return done.result()
            except BrokenProcessPool as error:
                raise SimForcingError(
                    "a worker process died (killed, or out of memory); run the same command again, "
                    "with fewer --workers if memory is short"
                ) from error
        try:
            return self._ray.get(done)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:200]
            raise SimForcingError(f"--engine ray: a worker failed ({reason}); run the same command again") from error


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    """What a Ray worker runs; Ray's own wrapper takes plain functions only, and no partial ones."""
    return function(item)


@contextmanager
def _ray(workers: int) -> Iterator[Any]:
    """Ray, connected; what was started here ends here."""
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError as error:
        raise SimForcingError("--engine ray: ray is not installed; pip install ray") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:  # there is no cluster to join
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()
