"""The front door: the curated names exist, what is public is curated, and opening the door costs nothing."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import asupervisor

ROOMS_NOT_AT_THE_DOOR = ("asupervisor.testing",)


def modules() -> list[ModuleType]:
    """Every public module of the rooms whose names belong to the front door."""
    found = []
    for info in pkgutil.walk_packages(asupervisor.__path__, "asupervisor."):
        private = any(part.startswith("_") for part in info.name.split("."))
        if not private and not info.name.startswith(ROOMS_NOT_AT_THE_DOOR):
            found.append(importlib.import_module(info.name))
    return found


@pytest.mark.parametrize("name", sorted(asupervisor._HOMES))
def test_each_curated_name_exists_and_is_explained(name: str) -> None:
    value = getattr(asupervisor, name)
    assert value.__module__ == f"asupervisor.{asupervisor._HOMES[name]}", "its home is where it is defined"
    assert inspect.getdoc(value)
    assert not name.startswith("_")


def test_each_exception_is_curated() -> None:
    for module in modules():
        for name, value in vars(module).items():
            if (
                inspect.isclass(value)
                and issubclass(value, BaseException)
                and value.__module__ == module.__name__
                and not name.startswith("_")
            ):
                assert name in asupervisor.__all__, f"{module.__name__}.{name}"


def test_the_table_equals_the_imports_for_type_checkers() -> None:
    source = ast.parse(Path(asupervisor.__file__).read_text())
    block = next(node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "re-exported names say so"
            imported[alias.name] = str(node.module).removeprefix("asupervisor.")
    assert imported == asupervisor._HOMES


def test_names_are_listed_and_unknown_ones_refused() -> None:
    assert set(asupervisor.__all__) <= set(dir(asupervisor))
    with pytest.raises(AttributeError, match="module 'asupervisor' has no attribute 'Sessions'"):
        asupervisor.Sessions  # noqa: B018


def test_public_objects_lie_at_the_door_or_in_a_room() -> None:
    """What the door shows beside its curated names is its rooms."""
    rooms = {info.name for info in pkgutil.iter_modules(asupervisor.__path__)}
    shown = {name for name in dir(asupervisor) if name.isidentifier() and not name.startswith("_")}
    assert shown - set(asupervisor.__all__) - rooms == {"annotations", "importlib", "TYPE_CHECKING", "Any"}


def run(code: str, python: str, environ: dict[str, str]) -> str:
    done = subprocess.run([python, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_door_opens_without_tensorflow(python: str, fresh_environ: dict[str, str]) -> None:
    code = """
import sys, asupervisor
from asupervisor import SessionClosed, Coordinator, LooperTask, DeviceExecutor, Event, Status, SystemClock
import asupervisor.testing, asupervisor.testing.plugin
heavy = {"tensorflow", "numpy", "keras", "google.protobuf"} & set(sys.modules)
print(sorted(heavy))
"""
    assert run(code, python, fresh_environ).strip() == "[]"


def test_the_door_opens_quickly(python: str, fresh_environ: dict[str, str]) -> None:
    """Importing asupervisor costs next to nothing beside starting the interpreter; best of several."""
    code = """
import time
began = time.thread_time()
import asupervisor
print(time.thread_time() - began)
"""
    assert min(float(run(code, python, fresh_environ)) for _ in range(3)) < 0.05


def test_the_version_is_the_projects(pytestconfig: pytest.Config) -> None:
    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]
    assert project["version"] == asupervisor.__version__
