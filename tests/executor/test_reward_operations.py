"""How rules fare is counted exactly, said, and found by an alarm; one that is down is not asked for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_judge import SECRET, Server, rule, says

from executor.coordination.detectors import Expected, findings
from executor.rewards import judge, operations
from executor.rewards.operations import BREAKER_S, BREAKER_SAMPLES, RuleWatch, rows_of
from executor.rewards.rules import Scorer
from executor.settings import RewardRule
from rlhfsim.errors import RlhfsimError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setattr(judge, "FIRST_WAIT_S", 0.001)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def texts(step: int, count: int = 20) -> list[tuple[str, str, str, dict[str, object], int]]:
    return [(f"p{step}.{i}", f"r{i}", "", {}, 100 * step + i) for i in range(count)]


def test_a_judge_that_fails_30_percent_is_counted_as_its_server_counts_and_named_at_once(
    server: Server,
) -> None:
    log: list[int] = []
    lock = threading.Lock()

    def answer(number: int, text: str) -> tuple[int, dict[str, str], str]:
        status = 503 if number % 10 in (2, 5, 8) else 200
        with lock:
            log.append(status)
        return (503, {}, "busy") if status == 503 else says("Score: 7")

    server.answer = answer
    rows: list[dict[str, float]] = []
    asked = replace(rule(server, retries=0, on_error="drop", concurrency=4), timeout_s=60.0)
    with Scorer([asked, RewardRule(kind="digits")], workers=1) as scorer:
        for step in range(2):
            scored = scorer.score(texts(step))
            counts = scorer.taken()
            rows.append(rows_of(counts))
            assert rows[-1]["rules/judge/dropped"] == sum(s.total is None for s in scored)
    assert sum(row["rules/judge/tries"] for row in rows) == len(log) == len(server.requests)
    assert sum(row["rules/judge/failed_tries"] for row in rows) == log.count(503) == 12
    assert sum(row["rules/judge/samples"] for row in rows) == 40
    assert 0 < rows[0]["latency/judge/p50_s"] <= rows[0]["latency/judge/p99_s"]
    [found] = [f for f in findings(rows[:1], Expected()) if f.code == "reward-rule-failing"]
    assert (
        found.what == f"{rows[0]['rules/judge/failed_tries']:.0f} of the last 20 tries of rule judge failed"
    )
    line = counts["judge"].words("judge")
    assert line is not None
    assert "of 20 tries failed" in line
    assert "sample 1" in line
    assert "HTTP 503" in line
    assert "rules/digits/samples" not in rows[0], "what cannot fail is not counted"


def test_tries_that_are_made_good_raise_the_alarm_too(server: Server) -> None:
    server.answer = lambda n, text: (429, {}, "") if n % 2 else says("Score: 7")
    with Scorer([rule(server, retries=9, on_error="drop", concurrency=1)], workers=1) as scorer:
        assert all(s.total == 0.7 for s in scorer.score(texts(0, 5)))
        counts = scorer.taken()["judge"]
    assert (counts.failed, counts.failed_tries, counts.retried, counts.tries) == (0, 5, 5, 10)
    row = counts.row("judge")
    assert [f.code for f in findings([row], Expected())] == ["reward-rule-failing"]


def test_no_alarm_where_a_few_tries_fail() -> None:
    row = {"rules/judge/tries": 1000.0, "rules/judge/failed_tries": 20.0, "rules/judge/skipped": 0.0}
    assert not findings([row, row], Expected())
    row = {"rules/judge/tries": 8.0, "rules/judge/failed_tries": 1.0, "rules/judge/skipped": 0.0}
    assert not findings([row, row], Expected())


def test_a_rule_that_is_down_is_not_asked_for_a_while_then_tried_with_one_sample() -> None:
    now = [0.0]
    watch = RuleWatch(lambda: now[0])

    def ask(good: bool) -> str:
        try:
            with watch.sample("p", dropped=True) as tried:
                tried(None if good else ValueError("down"))
                if not good:
                    raise RlhfsimError("reward-judge", "down")
            return "asked"
        except RlhfsimError as error:
            return error.code

    for _ in range(BREAKER_SAMPLES):
        assert ask(good=False) == "reward-judge"
    assert ask(good=True) == "reward-circuit-open"
    now[0] += BREAKER_S
    assert [ask(good=False), ask(good=True)] == ["reward-judge", "reward-circuit-open"]
    now[0] += BREAKER_S
    assert [ask(good=True), ask(good=True)] == ["asked", "asked"]
    counts = watch.taken()
    assert counts.skipped == 2
    assert counts.failed == counts.dropped == BREAKER_SAMPLES + 3
    assert counts.tries == counts.samples - counts.skipped
    assert watch.taken().samples == 0


def test_a_judge_that_is_gone_costs_few_requests(server: Server) -> None:
    server.answer = lambda n, text: (500, {}, "")
    with Scorer([rule(server, retries=1, on_error="drop", concurrency=1)], workers=1) as scorer:
        scored = scorer.score(texts(0, 100))
        counts = scorer.taken()["judge"]
    assert all(s.total is None for s in scored)
    assert counts.skipped == 100 - BREAKER_SAMPLES
    assert counts.tries == len(server.requests) == 2 * BREAKER_SAMPLES
    [found] = findings([counts.row("judge")], Expected())
    assert f"{counts.skipped} samples were not asked for" in found.what


def test_time_outs_of_a_function_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_reward.py").write_text(
        "import time\n"
        "def score(prompt, response, answer, meta):\n"
        "    if response == 'r1': time.sleep(60)\n"
        "    if response == 'r2': raise ValueError('no')\n"
        "    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = RewardRule(kind="function", target="slow_reward:score", timeout_s=2.0, retries=0, on_error="zero")
    with Scorer([asked], workers=1) as scorer:
        scorer.score(texts(0, 3))
        counts = scorer.taken()["function"]
    assert (counts.tries, counts.failed_tries, counts.timed_out, counts.dropped) == (3, 2, 1, 0)
    assert counts.first.startswith("sample 1, prompt 'p0.1': ") or "sample 2" in counts.first


def test_counts_add_up_over_threads() -> None:
    watch = RuleWatch()

    def work() -> None:
        for _ in range(500):
            with watch.sample("p", dropped=False) as tried:
                tried(None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = watch.taken()
    assert counts.tries == counts.samples == len(counts.seconds) == 2000
    assert operations.rows_of({"judge": counts})["rules/judge/tries"] == 2000
