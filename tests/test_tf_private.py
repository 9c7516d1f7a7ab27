"""Tells when a private part of TensorFlow that `asupervisor._tf` reaches for has disappeared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tensorflow as tf

from asupervisor import _tf


def test_plugin_assets(tmp_path: Path, graph: tf.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.summary import plugin_asset

    assert callable(plugin_asset.get_all_plugin_assets)
    monkeypatch.setitem(sys.modules, "tensorflow.python.summary.plugin_asset", None)
    monkeypatch.delattr(sys.modules["tensorflow.python.summary"], "plugin_asset")
    _tf.write_plugin_assets(graph, str(tmp_path))  # without it: nothing is written
    assert not list(tmp_path.iterdir())
