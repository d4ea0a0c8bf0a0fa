"""What stands around the logits of a micro-batch in OpenRLHF, by trainer.

Read in openrlhf/models/actor.py (forward), models/utils.py (log_probs_from_logits), trainer/sft_trainer.py,
trainer/dpo_trainer.py and trainer/ray/ppo_actor.py of 0.8.11 to 0.11.2, whose lines
tests/frameworks/test_openrlhf_workers.py runs.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.placement.heads import Head

HELD = Head(
    train_bytes=10,
    score_bytes=6,
    source="OpenRLHF 0.11.2, models/actor.py, line 267, and trainer/ray/ppo_actor.py, line 292: FP32 logits, "
    "`output` holds them until the step ends; their FP32 gradient, and its BF16 copy",
)
SCALED = replace(
    HELD,
    train_bytes=12,
    source="OpenRLHF 0.11.2, models/actor.py, line 271: the same, and the gradient before a temperature that "
    "is not 1 beside the one behind it",
)
DROPPED = replace(
    HELD,
    train_bytes=8,
    source="OpenRLHF 0.11.2, trainer/dpo_trainer.py, line 315: `output` ends with the function that computes "
    "log-probs; FP32 logits and their gradient",
)
