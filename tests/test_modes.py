"""The suite once more with TensorFlow's v2 behaviour off: graph mode by default, ref variables by default."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

LIMIT_SECS = 2400

OtherMode = tuple["subprocess.Popen[bytes]", Any]


@pytest.mark.timeout(LIMIT_SECS + 60)
def test_with_v2_behaviour_off(other_mode: OtherMode) -> None:
    """A fifth of what is marked `modes`, the same fifth each time, passes there, too."""
    check(other_mode)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_SECS + 60)
def test_with_v2_behaviour_off_whole(other_mode: OtherMode) -> None:
    """All of it does."""
    check(other_mode)


def check(other_mode: OtherMode) -> None:
    process, output = other_mode
    process.wait(LIMIT_SECS)
    output.seek(0)
    text = output.read().decode(errors="replace")
    assert " passed" in text, text
    if process.returncode != 0:
        pytest.fail(f"with v2 behaviour off:\n{text}", pytrace=False)


@pytest.mark.modes
def test_this_run_has_the_mode_that_it_was_asked_for(tf_mode: str) -> None:
    import tensorflow as tf

    assert tf.executing_eagerly() == (tf_mode == "v2")
    assert tf.compat.v1.resource_variables_enabled() == (tf_mode == "v2")
