"""The process that environments live in: calls over a pipe, many at a time, each with a time limit.

A message is (conversation, method, argument); an answer (conversation, value, fault, seconds). Coroutines
share one event loop; plain functions have a thread each.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from executor.environments.protocol import AgentEnvironment, check_answer
from executor.environments.registry import environment_class
from executor.rewards import protocol
from executor.rewards.calls import served
from executor.samples import Fault


class _EnvironmentServer:
    """The environments of open conversations."""

    def __init__(self, make: Callable[[], AgentEnvironment], timeout_s: float, replies: Any) -> None:
        self._make, self._timeout_s, self._replies = make, timeout_s, replies
        self._open: dict[int, AgentEnvironment] = {}

    async def answer(self, number: int, method: str, argument: Any) -> None:
        """Call, and tell what came of it."""
        began = time.monotonic()
        value, fault = None, None
        try:
            async with asyncio.timeout(self._timeout_s):
                value = check_answer(method, await self._called(number, method, argument))
        except TimeoutError:
            fault = Fault("timeout", f"{method} gave no answer within {self._timeout_s:g} s")
        except Exception as error:
            fault = Fault("error", "".join(traceback.format_exception_only(error)).strip())
        if method != "close":
            body = pickle.dumps((number, value, fault, time.monotonic() - began))
            protocol.write_message(self._replies, body)

    async def _called(self, number: int, method: str, argument: Any) -> Any:
        if method == "reset":
            self._open[number] = self._make()
        environment = self._open[number] if method != "close" else self._open.pop(number, None)
        if environment is None:
            return None
        function = getattr(environment, method)
        arguments = () if method == "close" else (argument,)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await _in_thread(function, *arguments)


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """A plain function in a thread of its own: one that hangs holds up nobody else."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():  # the time limit may have been first
            done.set_result(value) if error is None else done.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = function(*arguments)
        except BaseException as error:
            failure = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def _serve(server: _EnvironmentServer, requests: Any) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    while (body := await loop.run_in_executor(None, protocol.read_message, requests)) is not None:
        task = asyncio.create_task(server.answer(*pickle.loads(body)))
        running.add(task)
        task.add_done_callback(running.discard)


def serve() -> None:
    """Answer until stdin closes. What environments print goes to stderr.

    Threads that hang do not hold up the end: the other side kills the process after a while.
    """
    requests, replies = served()
    settings = pickle.loads(protocol.read_message(requests) or b"")
    try:
        make = environment_class(settings.kind, settings.options)
    except Exception as error:
        protocol.write_message(replies, pickle.dumps(str(error)))
        sys.exit(1)
    at_once = getattr(make.func, "at_once", settings.concurrency)
    protocol.write_message(replies, pickle.dumps(int(at_once)))
    asyncio.run(_serve(_EnvironmentServer(make, settings.timeout_s, replies), requests))
