"""The command table, exit codes and the one-line errors; `doctor`."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import simforcing
from simforcing.cli import doctor
from simforcing.cli import main as cli
from simforcing.cli.doctor import Check, Doctor
from simforcing.errors import SimForcingError

Run = Callable[[BaseException | int], int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command `try` that returns the number or raises the exception given."""

    def go(outcome: BaseException | int) -> int:
        @dataclass(frozen=True)
        class Try:
            """Try it."""

            def run(self) -> int:
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome

        monkeypatch.setattr(cli.Command, "load", lambda command: Try)
        monkeypatch.setattr(cli, "COMMANDS", (cli.Command(("try",), "try:Try", "try it"),))
        return cli.main(["try"])

    return go


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_each_command_loads_and_has_an_example(command: cli.Command) -> None:
    kind = command.load()
    assert callable(kind.run)
    assert "Example" in (kind.__doc__ or ""), "the help of a command shows an example"


def test_help_and_every_commands_options_need_no_torch() -> None:
    code = """
import sys
from simforcing.cli.main import COMMANDS, main
assert main(["--help"]) == 0
for command in COMMANDS:
    command.load()
heavy = {"torch", "diffusers", "mujoco", "matplotlib", "av", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for command in cli.COMMANDS:
        assert f"  {command.name} " in done.stdout


def test_help_of_a_command_shows_options_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "usage: simforcing doctor" in shown and "--disk-gib" in shown
    assert "simforcing doctor --path runs" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"simforcing {simforcing.__version__}\n"


def test_no_command_prints_help_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: simforcing COMMAND" in capsys.readouterr().out


def test_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["twin", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "twin pair" in shown and "doctor" not in shown
    assert cli.main(["twin"]) == 2


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("trian", "train"),
        ("twin pear", "twin pair"),
        ("pair", "twin pair"),
        ("docter x", "doctor"),
    ],
)
def test_an_unknown_command_names_the_nearest(typed: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(typed.split()) == 2
    assert capsys.readouterr().err == f"error: no command '{typed}'; did you mean '{nearest}'?\n"


def test_a_name_unlike_any_points_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["xyzzy"]) == 2
    assert capsys.readouterr().err == "error: no command 'xyzzy'; simforcing --help lists the commands\n"


def test_a_wrong_option_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--pth", "x"])
    assert stop.value.code == 2
    assert "--path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (SimForcingError("episode 3:\n  too short"), 2, "error: episode 3: too short\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            OSError(errno.ENOSPC, "full", "out/a.mp4"),
            2,
            "error: no space left on the disk while writing out/a.mp4; free some and run the same command again\n",
        ),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/run"),
            2,
            "error: cannot use file/run: Not a directory; choose another path\n",
        ),
        (
            ModuleNotFoundError("no", name="mujoco"),
            2,
            "error: mujoco is not installed; pip install 'simforcing[sim]'\n",
        ),
    ],
)
def test_exit_codes_and_one_line_errors(
    outcome: BaseException | int, code: int, said: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(outcome) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "broken"),
        OSError(errno.EACCES, "denied"),
        ModuleNotFoundError("no", name="json5"),
        ValueError("x"),
    ],
)
def test_other_errors_keep_their_traceback(error: Exception, run: Run) -> None:
    with pytest.raises(type(error)):
        run(error)


TERMINATED = """
import sys, time
from simforcing.cli import main as cli

class Try:
    def run(self):
        try:
            print("running", flush=True)
            time.sleep(120)
        finally:
            print("cleaned up", flush=True)

cli._run = lambda command, args: Try().run()
sys.argv = ["simforcing", "doctor"]
sys.exit(cli.main())
"""


def test_a_terminated_command_cleans_up() -> None:
    process = subprocess.Popen([sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "cleaned up\n")


def test_signals_are_as_before_after_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["simforcing", "--version"])
    assert cli.main() == 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_world_model_is_imported_on_demand_only() -> None:
    code = """
import sys, simforcing
assert "torch" not in sys.modules
assert "WorldModel" in dir(simforcing)
from simforcing import WorldModel
assert WorldModel.__module__ == "simforcing.model.world_model" and "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = simforcing.nothing


def test_doctor_exit_code_follows_the_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [Check("one", True, "fine [a]"), Check("two", True, "fine")]
    monkeypatch.setattr(Doctor, "checks", lambda self: [lambda c=c: c for c in outcomes])
    assert Doctor().run() == 0
    assert "fine [a]" in capsys.readouterr().out
    outcomes[1] = Check("two", False, "broken")
    assert Doctor().run() == 1
    assert "FAILED" in capsys.readouterr().out


def test_doctor_checks_this_machine(tmp_path: Path) -> None:
    assert doctor.check_python().ok and doctor.check_torch().ok
    assert doctor.check_video().ok, doctor.check_video().detail
    assert Doctor(path=tmp_path / "not" / "yet", disk_gib=1e-6).check_disk().ok
    assert not Doctor(path=tmp_path, disk_gib=1e9).check_disk().ok


def test_doctor_draws_and_names_a_renderer_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    found = doctor.check_rendering()
    assert found.ok, found.detail
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    broken = doctor.check_rendering()
    assert not broken.ok and "works, so set it" in broken.detail
