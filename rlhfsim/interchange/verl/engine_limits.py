"""Limits of verl's rollout engine that its workers change, or take from another key than the parser shows.

What vLLM is started with, by release (verl/workers/rollout/vllm_rollout/vllm_async_server.py; until 0.6 also
vllm_rollout_spmd.py, the default mode):

    release         longest context                      a budget of prefill below it
    until 0.6       prompt and response                  refused: by verl, without chunked prefill by vLLM
    0.7 to 0.9.0    max_model_len, or the model's own    without chunked prefill refused by vLLM
    0.9.1           max_model_len, or the model's own    without chunked prefill raised to it (line 1113)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import refused
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.table import Codec
from rlhfsim.interchange.verl.versions import LEAVES_LOGITS, MODEL, ROLL, SERVERS, VERSION, before
from rlhfsim.specs.model.presets import resolve_model

BATCHED, CHUNKED, CONTEXT = (
    f"{ROLL}.{name}" for name in ("max_num_batched_tokens", "enable_chunked_prefill", "max_model_len")
)
STANDALONE = f"{ROLL}.standalone_gpu_memory_utilization"
RAISED = LEAVES_LOGITS
"""First release that raises the budget."""
USUAL = 8192
"""Tokens that the engine prefills at once, if nobody says so."""


def context(s: FrameworkSettings, longest: int) -> int:
    """The longest sequence that the engine takes; `longest`: prompt and response at their limits."""
    if before(s.find(VERSION), SERVERS):
        return longest
    return s.count(CONTEXT) or resolve_model(s.model(MODEL)).max_position or longest


def _raised(s: FrameworkSettings) -> bool:
    return not s.flag(CHUNKED, default=True) and not before(s.find(VERSION), RAISED)


def _batched(s: FrameworkSettings, keys: tuple[str, ...], usual: Any) -> int:
    said = s.whole(*keys, default=usual)
    return max(said, context(s, said)) if _raised(s) else said


def _utilization(s: FrameworkSettings, keys: tuple[str, ...], usual: Any) -> float:
    """Share of memory; engines on GPUs of their own have another in the one trainer that reads it
    (experimental/fully_async_policy/fully_async_rollouter.py, line 115 of 0.9.1)."""
    if "fully_async" in str(s.find(ENTRY_POINT)) and s.find(STANDALONE) is not None:
        return s.share(STANDALONE, default=usual)
    s.overruled(STANDALONE)
    return s.share(*keys, default=usual)


BATCHED_TOKENS = Codec(lambda tokens: tokens, _batched)
MEMORY = Codec(lambda share: share, _utilization)


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Prefills that an engine refuses, or does otherwise than its keys say."""
    chunked, version = s.flag(CHUNKED, default=True), s.find(VERSION)
    batched, most = s.count(BATCHED) or USUAL, context(s, (run.max_prompt or 0) + (run.max_response or 0))
    serves = not before(version, SERVERS)
    if batched >= most or (chunked and (serves or s.find(f"{ROLL}.mode") == "async")):
        return
    off = "" if chunked else ", and chunked prefill is off"
    what = f"the engine prefills {batched:,} tokens at once, a sample has up to {most:,}{off}: "
    if serves and not before(version, RAISED):
        yield Finding(
            what=f"{what}verl raises it to that, which its memory is priced with",
            keys=(BATCHED, CHUNKED, CONTEXT),
            remedy=f"{CHUNKED}=True, or {CONTEXT} for prompt and response alone",
        )
        return
    yield refused(
        f"{what}verl refuses it" if chunked else f"{what}vLLM refuses it",
        BATCHED,
        CHUNKED,
        remedy=f"{BATCHED}={most}" if chunked or not serves else f"{CHUNKED}=True",
    )
