"""Work in this process, in others, and on Ray; workers that end with their parent."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from simforcing.errors import SimForcingError
from simforcing.twin.parallel import Workers

HELPERS = """
import os
from simforcing.errors import SimForcingError

def square(number):
    return number * number

def complain(number):
    raise SimForcingError(f"number {number} is bad")

def whoami(number):
    return os.getpid()
"""


@pytest.fixture(scope="module")
def helpers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Functions in a module that worker processes can import."""
    folder = tmp_path_factory.mktemp("helpers")
    (folder / "parallel_helpers.py").write_text(HELPERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("parallel_helpers")


@pytest.mark.parametrize("count", [1, 2])
def test_each_item_once_whoever_does_it(count: int, helpers: Any) -> None:
    with Workers(count) as workers:
        assert sorted(workers.each(helpers.square, range(9))) == [(i, i * i) for i in range(9)]
        assert list(workers.each(helpers.square, [])) == []
        own = {pid for _, pid in workers.each(helpers.whoami, range(6))} == {os.getpid()}
        assert own == workers.here == (count == 1)
        with pytest.raises(SimForcingError, match=r"number \d is bad"):
            list(workers.each(helpers.complain, range(3)))


def test_a_dead_worker_is_one_clear_line() -> None:
    with (
        Workers(2) as workers,
        pytest.raises(SimForcingError, match=r"worker process died .* run the same command again"),
    ):
        list(workers.each(os._exit, [1, 2]))


def test_no_workers_are_refused() -> None:
    with pytest.raises(SimForcingError, match="workers is 0; give at least 1"):
        Workers(0)


def test_ray_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with Workers(2, "ray") as workers, pytest.raises(SimForcingError, match="ray is not installed"):
        list(workers.each(abs, [1]))


ORPHANS = """
import sys, time
sys.path.insert(0, {folder!r})
from simforcing.twin.parallel import Workers
import napping
if __name__ == "__main__":
    with Workers(2) as workers:
        for _, pid in workers.each(napping.nap, [0.0, 0.0, 60.0, 60.0]):
            print(pid, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "napping.py").write_text(
        "import os, time\ndef nap(seconds):\n    time.sleep(seconds)\n    return os.getpid()\n"
    )
    script = tmp_path / "main.py"
    script.write_text(ORPHANS.format(folder=str(tmp_path)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = {int(parent.stdout.readline()) for _ in range(2)}
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    until = time.monotonic() + 10
    while pids and time.monotonic() < until:
        pids = {pid for pid in pids if Path(f"/proc/{pid}").exists()}
        time.sleep(0.05)
    assert not pids, "workers live on after their parent was killed"


@pytest.mark.slow
def test_two_ray_workers_share_the_work() -> None:
    pytest.importorskip("ray", reason="needs the optional package ray")

    def complain(number: int) -> int:
        raise SimForcingError(f"number {number} is bad")

    with Workers(2, "ray") as workers:
        assert sorted(workers.each(partial(pow, 2), range(6))) == [(i, 2**i) for i in range(6)]
        with pytest.raises(SimForcingError, match="number 1 is bad"):
            list(workers.each(complain, [1]))
