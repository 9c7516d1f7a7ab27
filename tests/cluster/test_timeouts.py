"""How long a save may take before a frozen peer is suspected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from asupervisor._timeouts import LONG_SECS, for_save

ON_A_SERVER: Any = SimpleNamespace(sess_str="grpc://127.0.0.1:1")


def placeholders(*specs: tuple[Any, Any]) -> list[tf.Tensor]:
    with tf.Graph().as_default():
        return [tf.compat.v1.placeholder(dtype, shape) for dtype, shape in specs]


@pytest.mark.parametrize(
    ("specs", "secs"),
    [
        ([(tf.int64, [])], 30),
        ([(tf.float32, [1_000_000, 25]), (tf.float64, [25_000_000])], 30 + 60),
        ([(tf.float32, [10**9])], LONG_SECS),
        ([(tf.float32, [None, 3])], LONG_SECS),
        ([(tf.string, [2])], LONG_SECS),
        ([(tf.string._as_ref, [2])], LONG_SECS),
    ],
)
def test_a_save_has_time_by_its_size(specs: list[tuple[Any, Any]], secs: int) -> None:
    assert for_save(ON_A_SERVER, placeholders(*specs)).timeout_in_ms == secs * 1000


def test_alone_there_is_nobody_to_suspect() -> None:
    assert for_save(SimpleNamespace(sess_str=""), placeholders((tf.int64, []))) is None  # type: ignore[arg-type]
