"""What stands out in a configuration: rules of its framework, and what its ledger is full of."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.finding import Finding
from rlhfsim.memory.findings import host_findings, logits_findings, sleep_findings
from rlhfsim.what_if.doctor.case import Case, Judged


def findings(case: Case, base: Judged) -> Iterator[Finding]:
    """Those that end the run first."""
    described = base.described
    own = list(case.configuration.findings(described.settings, described.run))
    yield from (f for f in own if f.stops)
    yield from logits_findings(base.memory, described.specs.placement, described.specs.workload)
    yield from sleep_findings(base.memory, described.specs.placement)
    yield from host_findings(base.memory, described.specs.placement)
    yield from (f for f in own if not f.stops)
