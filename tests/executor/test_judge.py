"""A remote judge, against a server on loopback: what it is asked, how a score is read, what goes wrong."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.rewards import judge
from executor.rewards.rules import SampleText, Scorer
from executor.settings import Judge, RewardRule
from rlhfsim.errors import RlhfsimError

SECRET = "sk-secret-of-the-test"
Reply = tuple[int, dict[str, str], str]


class Server:
    """A stand-in for a chat server: `answer` says what the n-th request gets."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answer: Callable[[int, str], Reply] = lambda n, text: says("Score: 7")
        self.at_once = self.most_at_once = 0
        server, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                    server.requests.append((str(self.headers.get("Authorization")), body))
                    number = len(server.requests)
                status, headers, text = server.answer(number, body["messages"][-1]["content"])
                with lock:
                    server.at_once -= 1
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *args: object) -> None:
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


def says(text: str) -> Reply:
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}}]})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setattr(judge, "FIRST_WAIT_S", 0.01)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def rule(server: Server, *, retries: int | None = None, on_error: str = "stop", **changes: Any) -> RewardRule:
    settings = {"url": server.url, "model": "m", "prompt": "Q {prompt} R {response} A {answer}"} | changes
    asked = Judge(key_variable="JUDGE_KEY", **settings)
    return RewardRule(kind="judge", judge=asked, retries=retries, on_error=on_error, timeout_s=0.5)  # type: ignore[arg-type]


def scores(rule: RewardRule, *responses: str) -> list[float | None]:
    with Scorer([rule], workers=1) as scorer:
        return [s.total for s in scorer.score([SampleText("1+1", r, "2", {}) for r in responses])]


def test_a_judge_is_asked_with_the_sample_and_its_last_score_counts(server: Server) -> None:
    server.answer = lambda n, text: says("Score: 1? No: score = 7.5 of 10")
    assert scores(rule(server, system="Be fair."), "{answer} {prompt}") == [0.75]
    key, body = server.requests[0]
    assert key == f"Bearer {SECRET}"
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Q 1+1 R {answer} {prompt} A 2"},
        ],
        "temperature": 0.0,
        "max_tokens": 512,
    }


@pytest.mark.parametrize(
    ("reply", "changes", "value"),
    [
        ('{"grade": 3} then {"grade": "4", "why": "x"}', {"json_key": "grade", "range": (0, 4)}, 1.0),
        ("[[2]]", {"pattern": r"\[\[(\d+)\]\]", "range": (1, 5)}, 0.25),
        ("Score: 70", {}, None),
        ("Score: 0", {}, 0.0),
        ("I like it", {}, None),
        ('{"grade": null}', {"json_key": "grade"}, None),
        ('{"grade": ' + "[" * 100_000 + "}", {"json_key": "grade"}, None),
        ('{"grade": 1' + "0" * 400 + "}", {"json_key": "grade"}, None),
    ],
)
def test_a_score_is_read_as_the_settings_say(
    server: Server, reply: str, changes: dict[str, Any], value: float | None
) -> None:
    server.answer = lambda n, text: says(reply)
    assert scores(rule(server, retries=0, on_error="drop", **changes), "r") == [value]


def test_a_reply_nested_deep_is_no_score_and_no_crash(server: Server) -> None:
    server.answer = lambda n, text: (200, {}, "[" * 100_000)
    assert scores(rule(server, retries=0, on_error="drop"), "r") == [None]


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [({}, (0.005, 0.01, 0.02), (0.01, 0.02, 0.04)), ({"Retry-After": "2"}, 2.0, 3.0)],
)
def test_waits_are_half_to_all_of_a_doubling_limit_and_no_shorter_than_the_server_asks(
    header: dict[str, str], least: Any, most: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    server.answer = lambda n, text: (503, header, "") if n <= 3 else says("score 10")
    asked = rule(server, retries=3)
    with Scorer([asked], workers=1) as scorer:
        closing = scorer._judges[asked][0]._closing
        monkeypatch.setattr(closing, "wait", lambda seconds: bool(waits.append(seconds)))
        scorer.score([SampleText("1+1", "r", "2", {})])
    assert len(waits) == 3
    assert np.all(np.greater_equal(waits, least))
    assert np.all(np.less_equal(waits, most))


@pytest.mark.parametrize(("code", "least"), [(503, (0.005,) * 3), (429, (0.005, 0.01, 0.02))])
def test_waits_double_only_while_no_sample_is_answered_or_requests_are_too_many(
    code: int, least: tuple[float, ...], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = rule(server, retries=3)
    assert asked.judge is not None
    made, waits = judge.RemoteJudge(asked.judge), list[float]()
    failing = iter([(code, {}, "")] * 3)
    server.answer = lambda n, text: next(failing, says("score 10")) if "held up" in text else says("score 5")

    def others_are_answered(seconds: float) -> bool:
        waits.append(seconds)
        texts = {"prompt": "1+1", "response": f"other {len(waits)}", "answer": "2"}
        return made.score(texts, 0.5, 0) != 0.5

    monkeypatch.setattr(made._closing, "wait", others_are_answered)
    assert made.score({"prompt": "1+1", "response": "held up", "answer": "2"}, 0.5, 3) == 1.0
    assert len(waits) == 3
    assert np.all(np.greater_equal(waits, least))
    assert np.all(np.less_equal(waits, np.multiply(least, 2)))


def test_what_may_pass_is_tried_again_and_what_may_not_is_not(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    trouble: list[Reply] = [
        (429, {"Retry-After": "0"}, "slow down"),
        (500, {}, "oops"),
        (200, {}, "<html>"),
        says("no score here"),
        (503, {}, ""),
    ]
    server.answer = lambda n, text: (*trouble, says("score 10"))[n - 1]
    assert scores(rule(server), "r") == [1.0]
    assert len(server.requests) == 6
    server.answer = lambda n, text: (401, {}, f"wrong key {SECRET}")
    with caplog.at_level(logging.DEBUG), pytest.raises(RlhfsimError, match="HTTP 401") as caught:
        scores(rule(server), "other")
    assert len(server.requests) == 7
    server.answer = lambda n, text: (307, {"Location": server.url}, "")
    assert scores(rule(server, on_error="zero"), "moved") == [0.0]
    assert len(server.requests) == 8
    assert SECRET not in str(caught.value) + caplog.text


def test_a_slow_judge_is_given_up_in_time(server: Server) -> None:
    def slow(n: int, text: str) -> Reply:
        time.sleep(0.8)
        return says("score 1")

    server.answer = slow
    start = time.monotonic()
    with pytest.raises(RlhfsimError, match=r"no reply within 0.5 s"):
        scores(rule(server, retries=0), "r")
    assert time.monotonic() - start < 3
    server.http.server_close()
    with pytest.raises(RlhfsimError, match="gave no score") as caught:
        scores(rule(server, retries=1), "r")
    assert caught.value.code == "reward-judge"


def test_requests_go_side_by_side_up_to_the_limit_and_are_asked_once(server: Server) -> None:
    def some_time(n: int, text: str) -> Reply:
        time.sleep(0.05)
        return says("score 5")

    server.answer = some_time
    asked = rule(server, concurrency=4)
    responses = [f"r{i}" for i in range(12)]
    assert scores(asked, *responses) == [0.5] * 12
    assert server.most_at_once == 4
    assert scores(asked, *responses) == [0.5] * 12
    assert len(server.requests) == 12
    assert scores(rule(server, cache=False), "r0") == [0.5]
    assert len(server.requests) == 13


def test_what_cannot_work_is_refused_at_the_start(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RlhfsimError) as no_judge:
        Scorer([RewardRule(kind="judge")])
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RlhfsimError, match="JUDGE_KEY, which is not set") as no_key:
        Scorer([rule(server)])
    assert (no_judge.value.code, no_key.value.code) == ("reward-rule", "judge-key")
    monkeypatch.setenv("JUDGE_KEY", "k")
    for pattern in ("(", "no group"):
        with pytest.raises(RlhfsimError) as caught:
            Scorer([rule(server, pattern=pattern)])
        assert caught.value.code == "judge-pattern"
    urls = (
        "file:///etc/passwd",
        "http://",
        "http://[::1/v1",
        "http://judge:99999/v1",
        "http://judge:port/v1",
    )
    for wrong in (*({"url": url} for url in urls), {"range": (1, 1)}):
        with pytest.raises(ValueError, match=r"http|no room"):
            rule(server, **wrong)


def test_a_key_that_the_judge_echoes_is_neither_kept_nor_logged(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    padding = "x" * (80 - len(SECRET) // 2)
    server.answer = lambda n, text: (
        says(f"Authorization: Bearer {SECRET}. Score: 7")
        if "good" in text
        else (400, {}, f"{'y' * (500 - len(SECRET) // 2)}{SECRET}")
        if "bad" in text
        else says(f"{SECRET}{padding[: 80 - len(SECRET) // 2]}")
    )
    assert scores(rule(server), "good") == [0.7]
    kept = [file.read_text() for file in tmp_path.rglob("*.json")]
    assert len(kept) == 1
    with caplog.at_level(logging.DEBUG):
        scores(rule(server, on_error="zero", retries=0), "bad", "none")
    for text in (*kept, caplog.text):
        assert not any(SECRET[i : i + 6] in text for i in range(3, len(SECRET) - 5)), text


def test_a_reply_is_not_written_through_a_link(server: Server, tmp_path: Path) -> None:
    scores(rule(server), "r0")
    [kept] = tmp_path.rglob("*.json")
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    kept.unlink()
    kept.symlink_to(foreign)
    scores(rule(server), "r0")
    assert foreign.read_text() == "precious"
    assert not kept.is_symlink()
