"""The bash script that starts an exported run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from rlhfsim.outputs import comment
from rlhfsim.specs.frameworks.files import read_shipped

TORCHRUN = "exec torchrun "
"""Begins the command of a script that is started on every node, without Ray."""


def bash(head: str, needs: Mapping[str, str], body: str) -> str:
    """A script that ends at once where a variable that its body reads is not set."""
    lines = ["#!/usr/bin/env bash", *map(comment, head.splitlines()), "set -euo pipefail", ""]
    lines += [f': "${{{name}:?{what}}}"' for name, what in read_by(body, needs).items()]
    return "\n".join([*lines, "", body]) + "\n"


@cache
def needs_of(framework: str) -> Mapping[str, str]:
    """Variables that the scripts of a framework may read -> what they hold."""
    found: Mapping[str, str] = read_shipped(resources.files("rlhfsim.interchange") / "needs.yaml")[framework]
    return found


def read_by(script: str, needs: Mapping[str, str]) -> Mapping[str, str]:
    """Those of the variables that a script reads."""
    return {name: what for name, what in needs.items() if f"${{{name}" in script}
