"""A pytest-asyncio suite for a training program, with the managed session as a fixture.

Needs: ``pip install -e '.[dev]'``

Run::

    pytest examples/test_training.py

Set-up, test and tear-down of an async fixture are three different tasks: the managed session does not mind. The
pytest plugin that comes with asupervisor fails a test that leaves threads of a session behind.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

import digits

from asupervisor import AsyncSession, Supervisor

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def data() -> digits.Data:
    return digits.load()


@pytest.fixture
def model(data: digits.Data) -> digits.Model:
    return digits.build(data)


@pytest.fixture
def supervisor(model: digits.Model, tmp_path: Path) -> Supervisor:
    return Supervisor(graph=model.graph, logdir=tmp_path / "run", stop_grace_secs=5)


@pytest_asyncio.fixture
async def session(supervisor: Supervisor) -> AsyncIterator[AsyncSession]:
    async with supervisor.managed_session() as session:
        yield session


async def train(session: AsyncSession, model: digits.Model, data: digits.Data, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        images, labels = data.batch(step)
        loss, _ = await session.run([model.loss, model.train_op], {model.images: images, model.labels: labels})
        losses.append(float(loss))
    return losses


async def test_the_loss_falls(session: AsyncSession, model: digits.Model, data: digits.Data) -> None:
    losses = await train(session, model, data, steps=40)
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
    assert await session.run(model.global_step) == 40


async def test_an_untrained_model_knows_nothing(session: AsyncSession, model: digits.Model, data: digits.Data) -> None:
    seen = await session.run(model.digits, {model.asked_images: data.test_images})
    assert (seen == data.test_labels).mean() < 0.5


async def test_training_goes_on_where_it_stopped(
    supervisor: Supervisor, model: digits.Model, data: digits.Data
) -> None:
    question = {model.asked_images: data.test_images[:1]}
    async with supervisor.managed_session() as session:
        await train(session, model, data, steps=5)
        before = await session.run(model.probabilities, question)
    async with supervisor.managed_session() as session:  # the first one saved its last step
        assert await session.run(model.global_step) == 5
        assert (await session.run(model.probabilities, question) == before).all()


async def test_a_wrong_batch_is_an_error_of_that_step_only(
    session: AsyncSession, model: digits.Model, data: digits.Data
) -> None:
    with pytest.raises(ValueError, match="Cannot feed value of shape"):
        await session.run(model.train_op, {model.images: [[1.0]], model.labels: [1]})
    await train(session, model, data, steps=1)
