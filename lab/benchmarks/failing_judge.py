"""What a judge costs that fails for minutes: a server on the loopback that refuses a share of the requests.

    python lab/benchmarks/failing_judge.py [--minutes 5] [--step-seconds 30] [--failing 0.3]

Samples of a step end one after the other while it generates; each is scored as it ends, as in a run. What a
judge costs is what the step waits for it after the last sample. One step with a judge that never fails comes
first. No engine runs. Prints tries as the rule's counts have them and as the server's log has them, the step
whose alarm names the rule, and both waits as shares of the step.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from executor.coordination.detectors import Expected, findings
from executor.rewards.operations import rows_of
from executor.rewards.rules import Scorer
from executor.settings import Judge, RewardRule

SAMPLES = 64
GENERATING = 0.6
"""Share of a step in which samples end; it trains in the rest."""
REPLY_S = 0.5
"""Seconds until the judge replies."""
OK, BUSY = 200, 503


@dataclass(slots=True, kw_only=True)
class JudgeServer:
    """A judge that refuses some requests, and its log."""

    failing: float
    """Share of the requests."""
    log: Counter[int] = field(default_factory=Counter)
    """Requests by their status."""
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Serve at the address that is yielded."""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(REPLY_S)
                with judge._lock:
                    status = BUSY if judge._draw.random() < judge.failing else OK
                    judge.log[status] += 1
                self.send_response(status)
                self.end_headers()
                if status == OK:
                    self.wfile.write(json.dumps({"choices": [{"message": {"content": "Score: 7"}}]}).encode())

            def log_message(self, *_: object) -> None:
                """Counted above."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            threading.Thread(target=http.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{http.server_port}/v1"
            http.shutdown()


def waited(scorer: Scorer, step: int, step_s: float) -> float:
    """Seconds between the end of the last sample of a step and its last score."""
    scoring = []
    for number in range(SAMPLES):
        time.sleep(step_s * GENERATING / SAMPLES)
        sample = (f"prompt {step}", f"response {step}.{number}", "", {}, step * SAMPLES + number)
        scoring.append(scorer.start(lambda sample=sample: [sample]))
    ended = time.monotonic()
    for each in scoring:
        each.result()
    wait = time.monotonic() - ended
    time.sleep(max(0.0, step_s * (1 - GENERATING)))
    return wait


def main() -> None:
    """Print what was counted and what it cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--step-seconds", type=float, default=30.0)
    parser.add_argument("--failing", type=float, default=0.3)
    options = parser.parse_args()
    server, named, ours, rows = JudgeServer(failing=0.0), 0, Counter[str](), list[dict[str, float]]()
    with server.listening() as url:
        judge = Judge(url=url, model="judge", prompt="{response}", concurrency=16, cache=False)
        rule = RewardRule(kind="judge", judge=judge, retries=5, on_error="drop", timeout_s=30.0)
        with Scorer([rule], workers=1) as scorer:
            healthy = waited(scorer, 0, options.step_seconds)
            scorer.taken()
            server.log.clear()
            server.failing = options.failing
            waits, until = list[float](), time.monotonic() + 60 * options.minutes
            while time.monotonic() < until or not waits:
                waits.append(waited(scorer, len(waits) + 1, options.step_seconds))
                row = rows_of(scorer.taken())
                rows.append(row)
                ours.update(
                    {name.rpartition("/")[2]: round(n) for name, n in row.items() if "rules/" in name}
                )
                if not named and any(f.code == "reward-rule-failing" for f in findings(rows, Expected())):
                    named = len(waits)
    step_s = options.step_seconds
    print(f"{len(waits)} steps of {step_s:g} s, {SAMPLES} samples each")
    print(f"tries: {ours['tries']} counted, {server.log.total()} in the server's log")
    print(f"failed tries: {ours['failed_tries']} counted, {server.log[BUSY]} in the server's log")
    print(f"samples without a value: {ours['dropped']} of {ours['samples']}")
    print(f"named after step {named}" if named else "not named")
    print(f"waited after the last sample: {healthy / step_s:.1%} of a step without failures;")
    mean, most = sum(waits) / len(waits), max(waits)
    print(f"  {mean / step_s:.1%} with them (mean; longest {most / step_s:.1%})")


if __name__ == "__main__":
    main()
