"""Entry point of the `simforcing` command: finds the command's words, imports its module alone, runs it.

Exit codes: 0 ok, 1 failed, 2 bad input, 130 interrupted, 143 terminated.
"""

import difflib
import errno
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from simforcing import __version__
from simforcing.cli import policy
from simforcing.errors import SimForcingError


class Runnable(Protocol):
    """What a command's dataclass offers: its fields are the options."""

    def run(self) -> int:
        """Do it and return the exit code."""


@dataclass(frozen=True)
class Command:
    """One row of the table; `target` is `module:Class` under `simforcing.cli`, imported on use only."""

    words: tuple[str, ...]
    target: str
    summary: str

    @property
    def name(self) -> str:
        """The words as typed."""
        return " ".join(self.words)

    def load(self) -> type[Runnable]:
        """Import the command's dataclass."""
        module, name = self.target.split(":")
        loaded: type[Runnable] = getattr(importlib.import_module(f"simforcing.cli.{module}"), name)
        return loaded


COMMANDS = (
    Command(("demo",), "demo:Demo", "the whole road on the bundled world, ends with a report page"),
    Command(("data", "audit"), "data:AuditCommand", "what a dataset of any format is, and what is wrong with it"),
    Command(("data", "convert"), "data:ConvertCommand", "any supported dataset to LeRobot v3.0"),
    Command(("twin", "calibrate"), "calibrate:Calibrate", "where the camera stands, from real episodes: camera.json"),
    Command(("twin", "pair"), "twin:Pair", "add the simulated view to a dataset: paired dataset and QA"),
    Command(("twin", "augment"), "twin:Augment", "simulated rollouts on augmented trajectories, for the teacher"),
    Command(("encode",), "encode:Encode", "latents and text of a paired dataset, once, to the cache"),
    Command(("train",), "train:Train", "train a teacher, a student or a baseline; resumes by itself"),
    Command(("predict",), "predict:Predict", "what the camera will see: one or many clips"),
    Command(("evaluate",), "evaluate:Evaluate", "numbers with their protocol"),
    Command(("sweep", "guidance"), "sweep:SweepGuidance", "guidance weight against retention, restartable"),
    Command(("sweep", "steps"), "sweep:SweepSteps", "steps of both stages against quality and latency"),
    Command(("study",), "study:Study", "baselines, ablations and sweeps over seeds, a verdict on each claim"),
    Command(("report",), "report:Report", "one page of a folder of results and sweeps"),
    *(Command(("policy", word), target, summary) for word, target, summary in policy.ROWS),
    Command(("import",), "convert:Import", "the authors' or Wan2.2's weights to a model directory"),
    Command(("export",), "convert:Export", "a model directory to the authors' checkpoint file"),
    Command(("doctor",), "doctor:Doctor", "check this machine"),
)

# Modules that come with an extra, for the one line that says what to install.
EXTRAS = {
    "mujoco": "sim",
    "mink": "sim",
    "daqp": "sim",
    "cma": "sim",
    "libero": "libero",
    "robosuite": "libero",
    "websockets": "serve",
    "msgpack": "serve",
    "tensorboard": "track",
    "wandb": "track",
    "transformers": "text",
}


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# What a path given by the user can be wrong with, wherever it is first used.
UNUSABLE = (
    *(errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP),
    *(errno.ENOTEMPTY, errno.EEXIST, errno.EINVAL, errno.ENXIO, errno.EFBIG),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default `sys.argv[1:]`); return its exit code. Errors are one line on stderr.

    As the program itself (no `argv`) it also cleans up when it is terminated, and raises SystemExit(143) then.
    """
    try:
        if argv is None:
            with _terminated_as_exit():
                code = _dispatch(sys.argv[1:])
        else:
            code = _dispatch(list(argv))
        sys.stdout.flush()
        return code
    except SimForcingError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left (`| head`). Point stdout elsewhere, or Python complains once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in NO_SPACE:
            where = f" while writing {error.filename}" if error.filename else ""
            return _fail(f"no space left on the disk{where}; free some and run the same command again")
        if error.errno in UNUSABLE and error.filename:
            return _fail(f"cannot use {error.filename}: {error.strerror}; choose another path")
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        return _fail(f"{package} is not installed; pip install 'simforcing[{EXTRAS[package]}]'")


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143), so that whatever cleans up does. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _dispatch(args: list[str]) -> int:
    """Split `args` into command words and options; answer `--help` and `--version` from the table alone."""
    words = [word for word in args[:2] if not word.startswith("-")]
    if args[:1] == ["--version"]:
        print(f"simforcing {__version__}")
        return 0
    if not args or (not words and args[0] in ("-h", "--help")):
        print(overview(COMMANDS))
        return 0 if args else 2
    for command in COMMANDS:
        if tuple(args[: len(command.words)]) == command.words:
            return _run(command, args[len(command.words) :])
    group = [command for command in COMMANDS if len(command.words) > 1 and command.words[0] == args[0]]
    if group and (len(args) == 1 or args[1] in ("-h", "--help")):
        print(overview(group))
        return 0 if len(args) > 1 else 2
    raise SimForcingError(_unknown(words or args[:1]))


def _run(command: Command, args: list[str]) -> int:
    """Parse `args` into the command's dataclass (tyro exits with 2 where that fails) and run it."""
    import tyro

    kind = command.load()
    help_text = inspect.getdoc(kind) or command.summary
    options = tyro.cli(kind, prog=f"simforcing {command.name}", args=args, description=help_text)
    return options.run()


def overview(commands: Sequence[Command]) -> str:
    """The help page: usage and one line a command."""
    width = max(len(command.name) for command in commands)
    rows = [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    usage = "usage: simforcing COMMAND [options]     (each command has --help with an example)"
    return "\n".join([usage, "", "commands:", *rows, "", "options:", "  --version, --help"])


def _unknown(words: list[str]) -> str:
    """One line that names the nearest command."""
    typed = " ".join(words)
    names = [command.name for command in COMMANDS]
    # Compare with the command alone first, since what follows it may be its argument.
    near = difflib.get_close_matches(typed, names, n=1) or difflib.get_close_matches(words[0], names, n=1)
    near = near or [name for name in names if words[0] == name.split()[0]][:1]
    hint = f"did you mean {near[0]!r}?" if near else "simforcing --help lists the commands"
    return f"no command {typed!r}; {hint}"


def _fail(message: str) -> int:
    """Print `error: <one line>` on stderr; exit code of bad input."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
