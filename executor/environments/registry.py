"""Environments by name: the shipped kinds, and classes of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from executor.environments.protocol import AgentEnvironment
from executor.targets import resolve
from rlhfsim.errors import RlhfsimError

KINDS: Mapping[str, str] = {
    "python": "executor.environments.python:PythonTool",
    "search": "executor.environments.search:SearchTool",
    "guess": "executor.environments.guess:GuessGame",
}
"""Kind -> module:Class."""


def environment_class(kind: str, options: Mapping[str, Any]) -> partial[AgentEnvironment]:
    """What makes the environment of one conversation.

    Raises:
        RlhfsimError: no such class, or options that it does not take.
    """
    target = KINDS.get(kind, kind)
    try:
        make = partial(resolve(target), **options)
        made = make()
    except Exception as error:
        raise RlhfsimError(
            "environment-class",
            f"environment {kind!r} cannot be made: {type(error).__name__}: {error}",
            help="kind is python, search, guess or module:Class, importable in the working directory, "
            "called with the options",
        ) from error
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(made, name, None))]
    if missing:
        raise RlhfsimError(
            "environment-class",
            f"environment {kind!r} has no {' and no '.join(missing)}",
            help="see executor/environments/protocol.py for what an environment is",
        )
    return make
