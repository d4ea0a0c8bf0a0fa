"""How the rules of a run fare: tries, failures, waits by rule, and a circuit breaker for one that is down.

A rule that failed for `BREAKER_SAMPLES` samples in a row, whatever was tried, is not asked for `BREAKER_S`
seconds; then one sample is tried, and its outcome decides. Source of the pattern: Nygard 2007, Release It!
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rlhfsim.errors import RlhfsimError

BREAKER_SAMPLES, BREAKER_S = 16, 30.0
SHOWN = 60
"""Characters of a prompt."""


@dataclass(slots=True, kw_only=True)
class RuleCounts:
    """What happened to one rule since it was last asked."""

    samples: int = 0
    tries: int = 0
    """Calls of a function, requests to a judge; a reply that was kept is none."""
    failed_tries: int = 0
    retried: int = 0
    """Tries that followed a failed one."""
    timed_out: int = 0
    """Tries that ran past their limit."""
    failed: int = 0
    """Samples for which no try gave a value."""
    dropped: int = 0
    """Samples among these that teach nothing; others count as 0."""
    skipped: int = 0
    """Failed samples that were not tried: the circuit breaker was open."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each sample, waits and all tries together."""
    first: str = ""
    """The first failure: its sample and the reason."""

    def row(self, name: str) -> dict[str, float]:
        """Metrics of the rule."""
        counts = ("samples", "tries", "failed_tries", "retried", "timed_out", "failed", "dropped", "skipped")
        row = {f"rules/{name}/{count}": float(getattr(self, count)) for count in counts}
        if self.seconds:
            p50, p99 = np.percentile(self.seconds, (50, 99))
            mean = float(np.mean(self.seconds))
            row |= {
                f"latency/{name}/{of}_s": s
                for of, s in (("mean", mean), ("p50", float(p50)), ("p99", float(p99)))
            }
        return row

    def words(self, name: str) -> str | None:
        """A line for people; None where all went well."""
        if not (self.failed_tries or self.failed):
            return None
        parts = [f"{self.failed_tries} of {self.tries} tries failed ({self.timed_out} ran out of time)"]
        parts += [f"{self.retried} tried again"] if self.retried else []
        parts += [f"{self.failed} of {self.samples} samples have no value"] if self.failed else []
        parts += [f"{self.dropped} dropped"] if self.dropped else []
        parts += (
            [f"{self.skipped} not asked for: {BREAKER_SAMPLES} in a row had failed"] if self.skipped else []
        )
        if self.seconds:
            p50, p99 = np.percentile(self.seconds, (50, 99))
            parts.append(f"P50 {p50:.3g} s, P99 {p99:.3g} s")
        return f"rule {name}: {', '.join(parts)}; the first: {self.first}"


Tried = Callable[..., None]
"""Takes the error of a try (None: it gave a value), and `timed_out`, `again`: another try follows."""


class RuleWatch:
    """Counts of one rule, from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._counts = RuleCounts()
        self._in_a_row, self._closed_until = 0, 0.0

    @contextmanager
    def sample(self, prompt: str, *, dropped: bool, number: int | None = None) -> Iterator[Tried]:
        """One sample is scored inside, which tells each try to what is yielded; `dropped`: if it fails.

        Raises:
            RlhfsimError: as inside; or the circuit breaker is open.
        """
        began = self._clock()
        try:
            self._admit()
            yield partial(
                self._tried, f"{'' if number is None else f'sample {number}, '}prompt {prompt[:SHOWN]!r}"
            )
        except RlhfsimError as error:
            with self._lock:
                if error.code != "reward-circuit-open":
                    self._in_a_row += 1
                    self._closed_until = self._clock() + BREAKER_S
                self._counts.failed += 1
                self._counts.dropped += dropped
                self._counts.first = self._counts.first or f"prompt {prompt[:SHOWN]!r}: {error.message}"
            raise
        else:
            self._in_a_row = 0
        finally:
            with self._lock:
                self._counts.samples += 1
                self._counts.seconds.append(self._clock() - began)

    def _tried(
        self, which: str, error: Exception | None, *, timed_out: bool = False, again: bool = False
    ) -> None:
        """A try for a sample has ended; `again`: another one follows."""
        with self._lock:
            self._counts.tries += 1
            self._counts.failed_tries += error is not None
            self._counts.timed_out += timed_out
            self._counts.retried += again
            if error is not None:
                reason = getattr(error, "message", error)
                self._counts.first = self._counts.first or f"{which}: {reason}"

    def _admit(self) -> None:
        with self._lock:
            if self._in_a_row < BREAKER_SAMPLES:
                return
            now = self._clock()
            if now >= self._closed_until:  # one sample is tried
                self._closed_until = now + BREAKER_S
                return
            self._counts.skipped += 1
        raise RlhfsimError(
            "reward-circuit-open", f"the rule failed for {self._in_a_row} samples in a row and is not asked"
        )

    def taken(self) -> RuleCounts:
        """What happened since this was last called."""
        with self._lock:
            counts, self._counts = self._counts, RuleCounts()
        return counts


def rows_of(counts: Mapping[str, RuleCounts]) -> dict[str, float]:
    """Metrics of all rules that were asked."""
    return {key: value for name, c in counts.items() if c.samples for key, value in c.row(name).items()}
