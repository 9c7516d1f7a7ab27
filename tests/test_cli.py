"""The command line: what it understands, how fast it answers, what it exits with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import asupervisor
from asupervisor import cli
from asupervisor.cluster import launcher

DEFAULTS = {
    "ps": 0,
    "workers": 0,
    "chief": True,
    "evaluator": False,
    "restarts": 3,
    "restart_window_secs": 300.0,
    "grace_secs": 30.0,
    "log_dir": None,
    "handle_signals": True,
}


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.main, args)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """What the launcher was asked for; it starts nothing, and returns 17."""
    asked: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    class Recorded(launcher.Launcher):
        def __init__(self, program: tuple[str, ...], **options: Any) -> None:
            super().__init__(program, **options)
            asked.append((program, options))

        async def run(self) -> int:
            return 17

    monkeypatch.setattr(launcher, "Launcher", Recorded)
    return asked


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize(
    ("args", "program_args", "options"),
    [
        (["train.py"], ["train.py"], {}),
        (["--ps", "1", "--workers=2", "train.py"], ["train.py"], {"ps": 1, "workers": 2}),
        (["--no-chief", "--workers", "1", "train.py"], ["train.py"], {"chief": False, "workers": 1}),
        (["--evaluator", "--chief", "train.py"], ["train.py"], {"evaluator": True}),
        (
            ["--restarts", "0", "--restart-window-secs", "60", "--grace-secs", "1.5", "--log-dir", "logs", "train.py"],
            ["train.py"],
            {"restarts": 0, "restart_window_secs": 60.0, "grace_secs": 1.5, "log_dir": Path("logs")},
        ),
        # What stands after the program is its own, whatever it looks like.
        (["--ps", "1", "train.py", "--ps", "3", "--help"], ["train.py", "--ps", "3", "--help"], {"ps": 1}),
        (["train.py", "--lr=0.1", "-x", "--", "y"], ["train.py", "--lr=0.1", "-x", "--", "y"], {}),
        (["--", "train.py", "--lr"], ["train.py", "--lr"], {}),
        (["-m", "json.tool", "--ps", "3"], ["-m", "json.tool", "--ps", "3"], {}),
        (["--ps", "1", "--no-chief", "--workers", "1", "-mthis"], ["-mthis"], {"ps": 1, "chief": False, "workers": 1}),
        (["--evaluator", "-m", "a", "-m", "b"], ["-m", "a", "-m", "b"], {"evaluator": True}),
    ],
    ids=" ".join,
)
def test_options_end_where_the_program_begins(
    asked: list[tuple[tuple[str, ...], dict[str, Any]]],
    program: Path,
    args: list[str],
    program_args: list[str],
    options: dict[str, Any],
) -> None:
    result = invoke("launch", *args)
    assert result.exit_code == 17, result.output
    assert asked == [(tuple(program_args), DEFAULTS | options)]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "Missing argument 'PROGRAM [ARGS]...'"),
        (["absent.py"], "there is no program 'absent.py'"),
        (["--workers", "two", "train.py"], "'two' is not a valid integer"),
        (["--ps", "-1", "train.py"], "-1 is not in the range x>=0"),
        (["--no-chief", "--ps", "1", "train.py"], "there is nobody to train"),
        (["--gpus", "1", "train.py"], "No such option"),
        (["--log-dir", "train.py", "train.py"], "is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_a_line(
    asked: list[tuple[tuple[str, ...], dict[str, Any]]], program: Path, args: list[str], complaint: str
) -> None:
    result = invoke("launch", *args)
    assert result.exit_code == 2
    assert complaint in result.output
    assert result.output.startswith("Usage: main launch [OPTIONS] PROGRAM [ARGS]...")
    assert asked == []


def test_a_launcher_that_cannot_start_is_told(asked: Any, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: launcher.Launcher) -> int:
        raise PermissionError(13, "Permission denied", "logs")

    monkeypatch.setattr(launcher.Launcher, "run", run)
    result = invoke("launch", "train.py")
    assert (result.exit_code, result.output) == (1, "Error: [Errno 13] Permission denied: 'logs'\n")


def test_an_early_ctrl_c_is_no_traceback(asked: Any, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: launcher.Launcher) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher.Launcher, "run", run)
    result = invoke("launch", "train.py")
    assert (result.exit_code, result.output) == (130, "")


@pytest.fixture
def command(python: str, fresh_environ: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "asupervisor", *args], env=fresh_environ, capture_output=True, text=True, timeout=60
        )

    return run


def test_the_module_runs_a_cluster(command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """The whole way, with nothing replaced."""
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(len(os.environ['TF_CONFIG']) > 50, sys.argv[1:]); sys.exit(3)")
    done = command("launch", "--ps", "1", str(program), "--help")
    assert done.returncode == 3
    assert "[chief/0] True ['--help']" in done.stdout.splitlines() or "[ps/0] True ['--help']" in done.stdout
    assert "failed with exit status 3, which is final: everything ends; the last lines of" in done.stderr


def test_help_answers_without_tensorflow(python: str, fresh_environ: dict[str, str]) -> None:
    code = """
import sys
from asupervisor.cli import main
try:
    main(sys.argv[1:])
finally:
    print("heavy:", sorted({"tensorflow", "numpy", "asupervisor.cluster"} & set(sys.modules)))
"""
    for args, text in ((["--help"], "launch"), (["launch", "--help"], "--restart-window-secs SECS")):
        done = subprocess.run(
            [python, "-c", code, *args], env=fresh_environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert text in done.stdout
        assert done.stdout.endswith("heavy: []\n")


def test_the_launcher_does_without_tensorflow(python: str, fresh_environ: dict[str, str]) -> None:
    code = "import sys, asupervisor.cluster.launcher; print(sorted({'tensorflow', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([python, "-c", code], env=fresh_environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_version(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = command("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"python -m asupervisor, version {asupervisor.__version__}\n"


def test_without_click_the_remedy_is_told(python: str, fresh_environ: dict[str, str]) -> None:
    code = "import sys; sys.modules['click'] = None; import asupervisor.cli"
    done = subprocess.run([python, "-c", code], env=fresh_environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: the command line of asupervisor needs click: pip install 'asupervisor[cli]'"
    )


def test_the_installed_command_is_this_one(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "pyproject.toml").read_text()
    assert '[project.scripts]\nasupervisor = "asupervisor.cli:main"\n' in text
    assert callable(cli.main)
    assert sys.modules["asupervisor.cli"] is cli
