"""What is known of a framework's configuration: its name, and what its keys say of a run.

A framework is a folder of `rlhfsim.frameworks` whose module `configuration` has a `CONFIGURATION`; nothing
lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, resources

from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.settings import FrameworkSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How to read the configuration of one framework."""

    name: str
    """As in `configuration_names`."""
    title: str
    describe: Callable[[FrameworkSettings, Mapping[str, float]], RunDescription]
    """From the configuration and the mean metrics of its log to what the run is."""


def configuration_names() -> tuple[str, ...]:
    """Names of the frameworks whose configurations can be read: their folders, `-` for `_`."""
    folders = resources.files("rlhfsim.frameworks").iterdir()
    return tuple(sorted(f.name.replace("_", "-") for f in folders if (f / "configuration.py").is_file()))


def configuration_named(name: str) -> Configuration:
    """How to read the configuration of one of `configuration_names`."""
    module = import_module(f"rlhfsim.frameworks.{name.replace('-', '_')}.configuration")
    known: Configuration = module.CONFIGURATION
    return known
