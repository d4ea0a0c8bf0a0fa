"""The bash script that starts an exported run."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfsim.outputs import comment

TORCHRUN = "exec torchrun "
"""Begins the command of a script that is started on every node, without Ray."""


def bash(head: str, needs: Mapping[str, str], body: str) -> str:
    """A script that ends at once where a variable that its body reads is not set."""
    lines = ["#!/usr/bin/env bash", *map(comment, head.splitlines()), "set -euo pipefail", ""]
    lines += [f': "${{{name}:?{what}}}"' for name, what in read_by(body, needs).items()]
    return "\n".join([*lines, "", body]) + "\n"


def read_by(script: str, needs: Mapping[str, str]) -> Mapping[str, str]:
    """Those of the variables that a script reads."""
    return {name: what for name, what in needs.items() if f"${{{name}" in script}
