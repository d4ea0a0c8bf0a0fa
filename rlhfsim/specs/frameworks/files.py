"""The files of a framework's folder: what it runs (`runs.yaml`), what its logits take in memory and
traffic (`heads.yaml`), what its software costs (`costs.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from rlhfsim.specs.placement.heads import Head


def data_of(framework: str, name: str) -> dict[str, Any]:
    """What a file of a framework says, or of none (empty); nothing where it has no such file."""
    path = Path(__file__).parent / framework.replace("-", "_") / f"{name}.yaml"
    return read_shipped(path) if path.is_file() else {}


def read_shipped(file: Traversable) -> dict[str, Any]:
    """What a YAML file of the package says."""
    found: dict[str, Any] = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    return found


@cache
def heads_of(framework: str) -> Mapping[str, Head]:
    """What the logits of a framework may take in memory and traffic, by release, trainer and options."""
    return {name: Head(**head) for name, head in data_of(framework, "heads").items()}
