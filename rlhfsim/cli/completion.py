"""What a shell offers after TAB, where click does not know it: names of GPUs, models, systems; files."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


def gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Hardware profiles and their short names, or YAML files."""
    from rlhfsim.specs.hardware.profile_files import aliases, profile_names

    return _offered((*(name.replace("_", "-") for name in profile_names()), *aliases()), incomplete)


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Model presets and short names, or config.json files."""
    from rlhfsim.specs.model.presets import aliases, preset_names

    return _offered((*preset_names(), *aliases()), incomplete)


def systems(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped systems, and files."""
    from rlhfsim.specs.scenario import system_names

    return _or_files(system_names(), incomplete)


def scenarios(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped what-if scenarios, and files."""
    from rlhfsim.what_if.scenarios.document import scenario_names

    return _or_files(scenario_names(), incomplete)


def _or_files(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [*_offered(names, incomplete), CompletionItem(incomplete, type="file")]


def _offered(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    if "/" in incomplete or incomplete.startswith((".", "~")):
        return [CompletionItem(incomplete, type="file")]
    begun = incomplete.lower()
    return [CompletionItem(name) for name in sorted(set(names)) if name.lower().startswith(begun)]
