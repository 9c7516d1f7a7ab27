"""The suite once more with TensorFlow's v2 behaviour off: graph mode by default, ref variables by default."""

from __future__ import annotations

import subprocess

import pytest

LIMIT_SECS = 1200


@pytest.mark.timeout(LIMIT_SECS + 60)
def test_with_v2_behaviour_off(python: str, fresh_environ: dict[str, str], pytestconfig: pytest.Config) -> None:
    """Every module that is marked `modes` passes there, too."""
    command = [python, "-m", "pytest", "-m", "modes and not full", "-p", "no:cacheprovider", "-q", "tests"]
    done = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=fresh_environ | {"ASUPERVISOR_TEST_TF_MODE": "v1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECS,
    )
    if done.returncode != 0:
        pytest.fail(f"with v2 behaviour off:\n{done.stdout}", pytrace=False)


@pytest.mark.modes
def test_this_run_has_the_mode_that_it_was_asked_for(tf_mode: str) -> None:
    import tensorflow as tf

    assert tf.executing_eagerly() == (tf_mode == "v2")
    assert tf.compat.v1.resource_variables_enabled() == (tf_mode == "v2")
