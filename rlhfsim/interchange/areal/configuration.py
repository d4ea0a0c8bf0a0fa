"""AReaL: what marks its configuration, and what it refuses at start, or in its first step.

areal/utils/datapack.py (`ffd_allocate`), areal/api/alloc_mode.py and cli_args.py (1.0.4).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.finding import Finding
from rlhfsim.interchange.areal import given_keys
from rlhfsim.interchange.areal.keys import ALLOCATIONS, BACKENDS, BUDGETS, TABLE
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import group_of_one, refused, short_budget
from rlhfsim.interchange.configuration.settings import FrameworkSettings

DATASET = r"^train_dataset:\n(?:[ \t].*\n)*?[ \t]+type: "


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is worth noting in the configuration."""
    if given_keys.trains_given(s):
        yield from given_keys.findings(s, run)
    else:
        yield from group_of_one(s, run, TABLE.key("workload.samples"))
        yield from short_budget(s, run, *BUDGETS, then="AReaL stops at the first batch with one", stops=True)
    nodes, each = (s.count(TABLE.key(f"cluster.{name}")) for name in ("nodes", "each"))
    used = run.gpus + (run.rollout_gpus or 0)
    if nodes and each and used > nodes * each:
        yield refused(
            f"the backends take {used} GPUs, the cluster has {nodes * each}",
            TABLE.key("cluster.nodes"),
            *BACKENDS,
            remedy=f"{TABLE.key('cluster.nodes')}={-(-used // each)}",
        )


CONFIGURATION = Configuration(
    name="areal",
    title="AReaL",
    describe=lambda s: (given_keys.TABLE if given_keys.trains_given(s) else TABLE).describe(s),
    findings=findings,
    entries=(r"\bareal\.launcher\.\w+", r"\bareal\.infra\.launcher\.\w+", given_keys.SCRIPT),
    unread={
        r"\bexamples/\w+/\w+_rw\.py|" + DATASET + r"rw\b": "reward_model",
        r"\bexamples/\w+/\w+_dpo\.py|" + DATASET + r"dpo\b": "dpo",
    },
    shown=("areal.launcher.local",),
    keys=(
        "gconfig.",
        "train_dataset.",
        "cluster.name_resolve.",
        "rollout.scheduling_",
        "actor.scheduling_",
        "actor.mb_spec.",
        TABLE.key("lag"),
        TABLE.key("workload.mini_batches"),
        ALLOCATIONS,
        *BACKENDS,
    ),
)
