"""A web service that trains the digits model and answers from the same session meanwhile.

Needs: ``pip install -e '.[examples]'``

Run::

    python examples/fastapi_app.py --logdir runs/served
    curl localhost:8000/status
    row='[0, 0, 5, 13, 9, 1, 0, 0]'; image="$row, $row, $row, $row, $row, $row, $row, $row"
    curl localhost:8000/predict -H 'content-type: application/json' -d '{"image": ['"$image"']}'

``/status`` tells how the training stands; ``/predict`` recognises an image of 8 by 8 pixels (0 to 16) with the
weights of this moment, between two training steps. The session lives as long as the application: it is entered in
the lifespan, and Ctrl-C saves the last step before the server ends.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up chatter

import digits
import numpy as np
import tensorflow as tf
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from asupervisor import AsyncSession, Supervisor

Pixel = Annotated[float, Field(ge=0, le=16)]
Row = Annotated[list[Pixel], Field(min_length=8, max_length=8)]


class Image(BaseModel):
    image: Annotated[list[Row], Field(min_length=8, max_length=8)]


class Answer(BaseModel):
    digit: int
    probability: float
    global_step: int


def create_app(logdir: str, steps: int) -> FastAPI:
    """An application that trains until the global step is `steps`, and goes on answering after that."""
    data = digits.load()
    model = digits.build(data)
    supervisor = Supervisor(
        graph=model.graph, logdir=logdir, save_model_secs=60, save_summaries_secs=5, stop_grace_secs=10
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with supervisor.managed_session() as session:
            supervisor.start_soon(train, session)
            supervisor.start_soon(end_server_on_failure)
            app.state.session = session
            yield

    async def train(session: AsyncSession) -> None:
        step = int(await session.run(model.global_step))
        remaining = max(0, steps - step)

        def feeds() -> Iterator[dict[Any, Any]]:
            for number in range(step, steps):
                images, labels = data.batch(number)
                yield {model.images: images, model.labels: labels}

        async for _ in session.steps(model.train_op, feeds(), max_steps=remaining):
            pass

    async def end_server_on_failure() -> None:
        """What fails inside a lifespan does not end a server; a signal does."""
        await supervisor.wait_for_stop()
        if supervisor.status().error is not None:
            signal.raise_signal(signal.SIGTERM)

    app = FastAPI(title="Digits", lifespan=lifespan)

    @app.get("/status")
    async def status() -> dict[str, Any]:
        now = supervisor.status()
        return {
            "state": now.state,
            "global_step": int(await app.state.session.run(model.global_step)),
            "steps_per_sec": now.steps_per_sec,
            "scalars": dict(now.scalars),
            "last_checkpoint": now.last_checkpoint,
        }

    @app.post("/predict")
    async def predict(asked: Image) -> Answer:
        image = np.array(asked.image, np.float32).reshape(1, 8, 8, 1) / 16
        digit, probabilities, step = await app.state.session.run(
            [model.digits, model.probabilities, model.global_step], {model.asked_images: image}
        )
        return Answer(digit=digit[0], probability=probabilities[0, digit[0]], global_step=step)

    return app


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--logdir", required=True, help="directory of checkpoints and summaries")
    parser.add_argument("--steps", type=int, default=20000, help="global step to reach (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one (default: %(default)s)")
    options = parser.parse_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    uvicorn.run(create_app(options.logdir, options.steps), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
