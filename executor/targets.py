"""Code of the user that settings name: `module:function` or `module:Class`."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any


def resolve(target: str) -> Callable[..., Any]:
    """The function or class of `module:name`."""
    module, _, name = target.partition(":")
    found: Any = operator.attrgetter(name)(importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"{target} is not a function")
    return found  # type: ignore[no-any-return]
