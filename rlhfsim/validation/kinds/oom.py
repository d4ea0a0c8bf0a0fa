"""Users' configurations that ran or ran out of memory, against the doctor's probability of not fitting.

The verdict `out of memory` is a probability of 0.5 or more, fixed in advance; the Brier score needs
no threshold. Scored are rows with a full configuration whose outcome the GPU memory of that
configuration decides; every other row is skipped with its reason. Rows with `settings` are in the keys of a
framework and go the way of `rlhfsim doctor`.
"""

from __future__ import annotations

from functools import partial

from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.step.measured import memory_doubt
from rlhfsim.units import GIB
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.cases.oom import configuration
from rlhfsim.validation.cases.oom_settings import half, ledger_of
from rlhfsim.validation.outcome import Outcome, Skip
from rlhfsim.validation.rows import Row
from rlhfsim.validation.statistics import SAYS_OOM
from rlhfsim.what_if.doctor.certainty import computed

NOT_THE_CONFIGURATION = {
    "C033": "the same settings work on 2 GPUs and fail on more: not the memory of one GPU",
    "C035": "processes appear forked: several copies run on each GPU",
    "C107": "memory grows over steps until it runs out, a cold restart clears it: a leak",
    "C116": "the same settings work with another inference layer: a fault of the software",
}
"""Cases whose thread names another cause than the configuration."""
OUTCOME = {"works": 0.0, "slow": 0.0, "oom_gpu": 1.0}


def outcomes(rows: list[Row]) -> list[Outcome]:
    """One outcome a row: measured 1 where it ran out of GPU memory, predicted the probability."""
    return [_outcome(row) for row in rows]


def excluded(row: Row) -> str | None:
    """Why a row is no test of a configuration, or None."""
    kind = row.words("kind")
    if kind not in OUTCOME:
        reasons = {
            "question": "a question, nobody ran it",
            "hang": "a hang, not memory",
            "oom_host": "host memory, whose other users the thread does not state",
        }
        return reasons.get(kind, f"kind {kind}")
    if not row.words("config_completeness").startswith("full"):
        return f"configuration is {row.text('config_completeness')}"
    if "gpu_mem_gb assumed" in row.words("inferred_fields"):
        return "the memory of the GPU is the reader's assumption, nobody stated it"
    return NOT_THE_CONFIGURATION.get(row.words("case_id"))


def _outcome(row: Row) -> Outcome:
    filled, notes = apply("oom", row)
    label = f"{row.text('case_id')} {row.text('model')} {row.text('gpus')}x {row.text('gpu_type') or '?'}"
    basic = partial(
        Outcome.of, row, "oom", label, source=row.text("framework") or row.source, unit="probability"
    )
    try:
        if reason := excluded(row):
            raise Skip(reason)
        memory = memory_of(row, filled)
    except Skip as skip:
        return basic(skipped=skip.message, detail={"half": half(row)})
    peak = memory.peak
    return basic(
        measured=OUTCOME[row.words("kind")],
        predicted=computed(memory),
        assumptions=notes,
        detail={
            "half": half(row),
            "peak_gib": peak.bytes / GIB,
            "capacity_gib": peak.capacity / GIB,
            "phase": peak.name,
            "breaks_in": memory.breaks_in(SAYS_OOM).name,
            "largest": f"{memory.peak_entry.role} {memory.peak_entry.component}",
            "no_start": memory.engine.probability_of_no_start if memory.engine else 0.0,
        },
    )


def memory_of(row: Row, filled: Row) -> Ledger:
    """The ledger of a row; `filled`: with assumptions for its blanks."""
    if row.text("settings"):
        return ledger_of(row)
    plan = configuration(filled)
    doubt = memory_doubt(plan.models, plan.placement.backend, plan.workload, plan.cluster)
    return ledger(plan.models, plan.placement, plan.workload, plan.cluster, doubt=doubt)
