"""What AReaL refuses at start, or in its first step.

areal/utils/datapack.py (`ffd_allocate`), areal/api/alloc_mode.py and cli_args.py (1.0.4).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.findings import Finding, group_of_one, short_budget
from rlhfsim.frameworks.configuration.settings import FrameworkSettings

BUDGETS = (
    "actor.mb_spec.max_tokens_per_mb",
    "ref.mb_spec.max_tokens_per_mb",
    "critic.mb_spec.max_tokens_per_mb",
)


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What stands out in the configuration."""
    yield from group_of_one(s, run, "gconfig.n_samples")
    yield from short_budget(s, run, *BUDGETS, then="AReaL stops at the first batch with one", stops=True)
    nodes, each = s.count("cluster.n_nodes"), s.count("cluster.n_gpus_per_node")
    used = run.gpus + (run.rollout_gpus or 0)
    if nodes and each and used > nodes * each:
        yield Finding(
            what=f"the backends take {used} GPUs, the cluster has {nodes * each}",
            keys=("cluster.n_nodes", "actor.backend", "rollout.backend"),
            remedy=f"cluster.n_nodes={-(-used // each)}",
            stops=True,
        )
