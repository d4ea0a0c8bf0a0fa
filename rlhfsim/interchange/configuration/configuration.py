"""What is known about a framework's configuration: its name, and what its keys say of a run.

A framework is a folder of `rlhfsim.interchange` whose module `configuration` has a `CONFIGURATION`; nothing
lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from rlhfsim import resources
from rlhfsim.errors import RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.forms import Said
from rlhfsim.interchange.configuration.served_reward import with_served_reward
from rlhfsim.interchange.configuration.settings import PLACEHOLDER, FrameworkSettings, SettingMissing
from rlhfsim.specs.workload.workload import Algorithm

ENTRY_POINT = "entry_point"
"""Key under which settings have the entry point of the command, as it is written there."""
"""The folder of what all frameworks share, this one."""


@frozen
class Configuration:
    """How to read the configuration of one framework."""

    name: str
    """As in `configuration_names`."""
    title: str
    describe: Callable[[FrameworkSettings], RunDescription]
    """From the configuration to what the run is."""
    entries: tuple[str, ...] = ()
    """Patterns of its entry points in a command: where one occurs, the configuration is its own."""
    started: tuple[str, ...] = ()
    """Patterns of entry points that others have too: where its arguments begin, not whose they are."""
    shown: tuple[str, ...] = ()
    """Its entry points as people write them."""
    unread: Mapping[str, Algorithm] = field(default_factory=dict)
    """Patterns of its trainers of given data whose keys are not read -> what they train by."""
    keys: tuple[str, ...] = ()
    """Beginnings of keys that no other framework has."""
    below: Callable[[Said], Mapping[str, Any]] = lambda said: {}
    """Values of its own configurations that a user's names and builds on, and of its entry points."""
    version_of: Callable[[Mapping[str, Any]], str | None] = lambda values: None
    """The version that keys give away; None: they do not."""
    spelled: Callable[[str, str | None], str | None] = lambda key, version: key
    """A key of the latest release as a version spells it; None: that version has no such key."""
    findings: Callable[[FrameworkSettings, RunDescription], Iterable[Finding]] = lambda settings, run: ()
    """What the framework itself would refuse or do otherwise than its keys suggest."""

    @property
    def version_key(self) -> str:
        """Key by which a configuration, or `--set`, names the version that reads it."""
        return f"{self.name.replace('-', '_')}_version"

    def run(self, settings: FrameworkSettings) -> RunDescription:
        """The run that a configuration describes; all that it leaves open is asked for at once.

        Raises:
            RlhfsimError: `not-enough-said` names every key that decides; or what is said does not fit.
        """
        open_keys: list[str] = []
        trial = settings
        while True:
            try:
                described = with_served_reward(trial, self.describe(trial))
            except SettingMissing as missing:
                open_keys.append(missing.key)
                trial = settings.with_values(dict.fromkeys(open_keys, PLACEHOLDER))
            except RlhfsimError:
                if not open_keys:
                    raise
                break
            else:
                if not open_keys:
                    return described
                break
        raise settings.not_enough(open_keys)


def configuration_names() -> tuple[str, ...]:
    """Names of the frameworks whose configurations can be read: their folders, `-` for `_`."""
    return resources.frameworks_with("configuration")


def configuration_named(name: str) -> Configuration:
    """How to read the configuration of one of `configuration_names`."""
    known: Configuration = resources.of_framework(name, "configuration").CONFIGURATION
    return known
