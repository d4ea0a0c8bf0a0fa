"""DAPO is written in the keys of every framework that runs it, and the part that one lacks is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.api import cluster_of
from rlhfsim.interchange.configuration.keys import key_table
from rlhfsim.interchange.dapo import KEYS, LACKS, UNFILTERED
from rlhfsim.interchange.export import export, exporters
from rlhfsim.interchange.table import bare
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.estimate import planned, priced_placement
from tests.frameworks.test_round_trip import RULES
from tests.what_if.test_doctor_of_exports import plans

FILTERS = ("verl", "openrlhf", "nemo-rl", "slime", "skyrl")
FILTER_KEYS = ("filter_groups.enable", "dynamic_filtering_enable", "use_dynamic_sampling", "filter-path")
CLIPS = ("clip_ratio_high", "eps_clip_low_high", "ratio_clip_max", "epsilon_high", "eps-clip-high", "higher")


def plain(work: Workload) -> bool:
    """GRPO by rules, without a reference."""
    return work.algorithm == "grpo" and not work.has_reference and work.reward == RULES


def dapo(name: str) -> Plan:
    """A plan of GRPO without a reference, trained by DAPO."""
    drawn = next(p for p in plans(name, 80) if plain(p.workload))
    sampling = DynamicSampling(kept=0.5) if name in FILTERS else None
    work = replace(drawn.workload, algorithm="dapo", dynamic_sampling=sampling)
    priced = priced_placement(drawn.placement, work, cluster_of(drawn))
    return planned(priced, priced.iteration, None)


@pytest.mark.parametrize("name", exporters())
def test_dapo_is_run_by_all_seven_and_every_part_is_written_or_named(name: str) -> None:
    exported = export(dapo(name), name, frozenset())
    values = exported.written.values
    assert any(key.endswith((*CLIPS, "eps_clip_high")) for key in values)
    assert any(key.endswith((*FILTER_KEYS, "dynamic_sampling.type")) for key in values) == (name in FILTERS)
    here = len(key_table(name).releases) - 1
    for key in KEYS.get(name, {}):
        assert key_table(name).at(bare(key), here) is not None, key
        assert key in values
    lacking = {unsaid.what for unsaid in exported.written.unsaid}
    assert set(LACKS.get(name, {})) <= lacking
    assert (UNFILTERED in lacking) == (name not in FILTERS)
    shaped = any("overlong_buffer" in key or "overlong_tokens" in key for key in values)
    assert shaped != any("overlong" in what for what in lacking)
