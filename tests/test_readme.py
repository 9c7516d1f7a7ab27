"""What the README says is true: its example runs, its commands are the ones that are run, its names exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import asupervisor


@pytest.fixture
def readme(pytestconfig: pytest.Config) -> str:
    return (pytestconfig.rootpath / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for name, body in found if name == language]


def test_the_example_runs_and_resumes(
    readme: str, tmp_path: Path, forks: Any, python: str, fresh_environ: dict[str, str]
) -> None:
    example, _ = blocks(readme, "python")
    assert len(example.splitlines()) <= 25
    (tmp_path / "example.py").write_text(example)
    outputs = []
    for first in (True, False):
        if first:  # in an interpreter of its own, as users start it
            done = subprocess.run(
                [python, "example.py"], cwd=tmp_path, env=fresh_environ, capture_output=True, text=True, timeout=100
            )
        else:
            done = forks.run("example.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines()[-1])
    found = re.fullmatch(r"step 500 w \[\[([0-9.]+)\]\]", outputs[0])
    assert found, outputs
    assert float(found[1]) == pytest.approx(3.0, abs=0.1)
    assert outputs[1] == outputs[0], "the second run has nothing left to do"
    assert list((tmp_path / "runs" / "line").glob("model.ckpt-500.index"))


def test_ci_runs_the_readmes_test_command(readme: str, pytestconfig: pytest.Config) -> None:
    main, tests = (block.strip() for block in blocks(readme, "sh"))
    assert main == "pip install -e '.[examples]' && python examples/train_digits.py --logdir runs/digits"
    assert tests.endswith("python -m pytest")
    assert f"{{ {tests}; }} || {{\n" in (pytestconfig.rootpath / ".ci" / "run").read_text()


def test_the_rooms_of_the_layout_exist(readme: str, pytestconfig: pytest.Config) -> None:
    package = Path(asupervisor.__file__).parent
    (layout,) = blocks(readme, "")
    listed = {line.split()[0] for line in layout.splitlines() if line.startswith("  ")}
    present = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert present <= listed
    assert all((package / name).exists() for name in listed)
    for name in re.findall(r"\b(?:examples|tests)/\w+\.py", readme):
        assert (pytestconfig.rootpath / name).exists(), name


def test_the_calls_of_the_table_exist(readme: str) -> None:
    owners = {
        "sv": asupervisor.Supervisor,
        "sess": asupervisor.AsyncSession,
        "coord": asupervisor.Coordinator,
    }
    table = [line.split(" | ", 1)[1] for line in readme.splitlines() if line.startswith("| `")]
    calls = {call for cell in table for call in re.findall(r"\b(sv|sess|coord)\.(\w+)", cell)}
    assert len(calls) >= 10
    for owner, name in calls:
        assert hasattr(owners[owner], name), f"{owner}.{name}"
