"""Waiting for whichever comes first, without a task group."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of several waits has ended, and cancel the others.

    What it raised, is raised. Cancelling it cancels all of them.

    Not a task group of anyio's: that leaves a cycle of references behind for each child that was cancelled (the
    error's traceback, and a frame that holds the error), and with it the frames of the child and all that they refer
    to, such as a session, until the garbage collector comes.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
