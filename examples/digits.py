"""The model of the examples: a small convolutional classifier of handwritten digits, in TensorFlow graph code.

The data are the 1,797 images of 8 by 8 pixels that scikit-learn ships: nothing is downloaded. Everything in here is
ordinary, synchronous `tf.compat.v1` code and knows nothing of asupervisor.

Needs: ``pip install -e '.[examples]'``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from sklearn.datasets import load_digits

BATCH = 64
HELD_OUT = 360  # one image in five

Images = NDArray[np.float32]
Labels = NDArray[np.int32]


@dataclass(frozen=True)
class Data:
    """The digits, divided for good: what a run is tested with, no run has been trained with."""

    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels

    def batch(self, step: int) -> tuple[Images, Labels]:
        """The batch of a step. It depends on the step only, so a run that resumes goes on in the same series."""
        chosen = np.random.default_rng(step).integers(0, len(self.images), BATCH)
        return self.images[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Model:
    """A graph and the tensors by which it is used."""

    graph: tf.Graph
    images: tf.Tensor  # what a step trains with: placeholders, or the end of an input queue
    labels: tf.Tensor
    loss: tf.Tensor
    accuracy: tf.Tensor
    global_step: Any
    train_op: tf.Operation
    asked_images: tf.Tensor  # a placeholder: images to be recognised
    digits: tf.Tensor  # the digits they show
    probabilities: tf.Tensor


def load() -> Data:
    """Read the data and set every fifth image aside for the test."""
    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = bunch.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return Data(images[train], labels[train], images[test], labels[test])


def build(data: Data, source: Literal["feed", "queue"] = "feed", seed: int = 1, device: Any = None) -> Model:
    """Make the graph.

    Args:
        data: What an input queue is to hold; with ``feed`` the caller feeds it.
        source: Where a step's batch comes from: ``feed`` means placeholders, ``queue`` a classic input pipeline
            that queue runners fill.
        seed: Seed of the initial weights and of the queue's order.
        device: Where things are placed, as `tf.compat.v1.device` takes it; for a cluster.
    """
    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.device(device):
        tf.compat.v1.set_random_seed(seed)
        images, labels = _placeholders() if source == "feed" else _queue(data, seed)
        logits = _logits(images)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        right = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels)
        accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
        global_step = tf.compat.v1.train.get_or_create_global_step()
        train_op = tf.compat.v1.train.AdamOptimizer(2e-3).minimize(loss, global_step=global_step)
        tf.compat.v1.summary.scalar("loss", loss)
        tf.compat.v1.summary.scalar("accuracy", accuracy)

        asked = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 1], name="asked")
        asked_logits = _logits(asked)
        return Model(
            graph=graph,
            images=images,
            labels=labels,
            loss=loss,
            accuracy=accuracy,
            global_step=global_step,
            train_op=train_op,
            asked_images=asked,
            digits=tf.argmax(asked_logits, 1, name="digits"),
            probabilities=tf.nn.softmax(asked_logits, name="probabilities"),
        )


def _placeholders() -> tuple[tf.Tensor, tf.Tensor]:
    return (
        tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 1], name="images"),
        tf.compat.v1.placeholder(tf.int32, [None], name="labels"),
    )


def _queue(data: Data, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
    """One queue of shuffled indices, one of shuffled examples; each has its queue runner in the graph."""
    indices = tf.compat.v1.train.range_input_producer(len(data.images), shuffle=True, seed=seed)
    chosen = indices.dequeue_many(BATCH)
    example = [tf.gather(tf.constant(data.images), chosen), tf.gather(tf.constant(data.labels), chosen)]
    images, labels = tf.compat.v1.train.shuffle_batch(
        example, BATCH, capacity=1024, min_after_dequeue=256, enqueue_many=True, seed=seed
    )
    return images, labels


def _logits(images: tf.Tensor) -> tf.Tensor:
    """Two convolutions and two dense layers; each call uses the same variables."""
    with tf.compat.v1.variable_scope("model", reuse=tf.compat.v1.AUTO_REUSE):
        hidden = _convolution("conv1", images, 16)
        hidden = _convolution("conv2", hidden, 32)
        hidden = tf.nn.max_pool2d(hidden, 2, 2, "VALID")
        hidden = tf.nn.relu(_dense("dense1", tf.reshape(hidden, [-1, 4 * 4 * 32]), 64))
        return _dense("dense2", hidden, 10)


def _convolution(name: str, inputs: tf.Tensor, channels: int) -> tf.Tensor:
    weights, biases = _weights(name, [3, 3, inputs.shape[-1], channels])
    return tf.nn.relu(tf.nn.conv2d(inputs, weights, strides=1, padding="SAME") + biases)


def _dense(name: str, inputs: tf.Tensor, units: int) -> tf.Tensor:
    weights, biases = _weights(name, [inputs.shape[-1], units])
    return tf.matmul(inputs, weights) + biases


def _weights(name: str, shape: list[int]) -> tuple[Any, Any]:
    with tf.compat.v1.variable_scope(name):
        fan_in = int(np.prod([int(size) for size in shape[:-1]]))
        start = tf.compat.v1.truncated_normal_initializer(stddev=(2.0 / fan_in) ** 0.5)
        weights = tf.compat.v1.get_variable("weights", shape, initializer=start)
        biases = tf.compat.v1.get_variable("biases", shape[-1:], initializer=tf.compat.v1.zeros_initializer())
    return weights, biases
