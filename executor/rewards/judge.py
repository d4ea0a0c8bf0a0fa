"""A remote judge: a model behind an OpenAI-compatible HTTP interface (`/chat/completions`) gives the score.

One request a sample. What is worth another try (429, 5xx, no answer in time, a reply without a score) waits
first: half to all of a limit, or as long as the server says. The limit doubles with every try of the sample
after a 429, else only while the judge gives no sample a score: one that fails now and then is not down, and
its last samples hold up the step. Replies are kept on disk under the hash of their request, so that a resumed
run pays nothing twice. The key comes from an environment variable and goes nowhere but into the request's
header: redirects are not followed, messages show no header.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np

from executor.rewards.answers import LOOKED_AT
from executor.rewards.operations import Tried
from executor.settings import Judge
from rlhfsim.cache import PRIVATE, Cache
from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import cache_folder

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
MAX_REPLY = 4 * 2**20
"""Bytes of a reply that are read."""
_CHUNK = 65536
_PLACES = re.compile(r"\{(prompt|response|answer)\}")
_AGAIN = (408, 409, 425, 429)


class JudgeError(Exception):
    """No score."""

    def __init__(
        self,
        what: str,
        *,
        again: bool = True,
        wait_s: float | None = None,
        timed_out: bool = False,
        too_many: bool = False,
    ) -> None:
        """`again`: another try may help; `wait_s`: what the server asks for; `too_many` requests: 429."""
        super().__init__(what)
        self.again, self.wait_s, self.timed_out, self.too_many = again, wait_s, timed_out, too_many


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected request would carry the key to another server."""

    def redirect_request(self, *args: Any) -> None:
        """Refuse."""


class RemoteJudge:
    """One judge of a run; several threads may ask."""

    def __init__(self, settings: Judge) -> None:
        """Raises RlhfsimError where the key's variable is not set, or the score's pattern is none."""
        self._settings = settings
        base = settings.url.rstrip("/")
        self._url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self._key = _key(settings.key_variable)
        self._pattern = _pattern(settings.pattern)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._closing = threading.Event()
        self._lock, self._failed_in_a_row = threading.Lock(), 0

    def score(
        self, texts: Mapping[str, str], timeout_s: float, retries: int, tried: Tried = lambda *_, **__: None
    ) -> float:
        """The score of a sample (its prompt, response and answer), 0 to 1 by the settings' range.

        `tried` is told of every request.

        Raises:
            JudgeError: none came, whatever was tried.
        """
        body = self._request(texts)
        name = hashlib.blake2b(f"{self._url}\n".encode() + body, digest_size=16).hexdigest()
        if (known := self._kept(name)) is not None:
            with contextlib.suppress(JudgeError):  # of another pattern
                return self._read(known)
        jitter = np.random.default_rng(int(name[:8], 16))
        for attempt in range(retries + 1):
            try:
                reply = self._ask(body, timeout_s)
                value = self._read(reply)
                self._keep(name, reply)
                self._ended(failed=False)
                tried(None)
                return value
            except JudgeError as error:
                in_a_row = self._ended(failed=True)
                last = not error.again or attempt == retries
                tried(error, timed_out=error.timed_out, again=not last)
                if last:
                    raise
                draw = float(jitter.uniform(0.5, 1.0))  # Brooker 2015, Exponential Backoff And Jitter
                doublings = attempt if error.too_many else min(attempt, in_a_row - 1)
                wait = (
                    FIRST_WAIT_S * 2**doublings * draw
                    if error.wait_s is None
                    else error.wait_s * (0.5 + draw)
                )
            if self._closing.wait(min(wait, LONGEST_WAIT_S)):
                raise JudgeError("the run ends", again=False)
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """End the waits."""
        self._closing.set()

    def _ended(self, *, failed: bool) -> int:
        """Requests that have failed, of all samples, since the judge last gave a score."""
        with self._lock:
            self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
            return self._failed_in_a_row

    def _request(self, texts: Mapping[str, str]) -> bytes:
        """The body; what a response says in braces stays as it is."""
        settings = self._settings
        content = _PLACES.sub(lambda place: texts[place[1]], settings.prompt)
        turns = [{"role": "system", "content": settings.system}] if settings.system else []
        fields = {
            "model": settings.model,
            "messages": [*turns, {"role": "user", "content": content}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }
        return json.dumps(fields).encode()

    def _ask(self, body: bytes, timeout_s: float) -> str:
        """The text of the judge's reply."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data=body, headers=headers)
        deadline = time.monotonic() + timeout_s
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                reply = _within(response, deadline)
            return str(json.loads(reply)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:  # a time-out is one
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise JudgeError(f"no reply within {timeout_s:g} s", timed_out=True) from None
            raise JudgeError(f"{type(error).__name__}: {self._without_key(str(reason))}") from None
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise JudgeError("the reply is no chat completion") from None

    def _refused(self, error: urllib.error.HTTPError) -> JudgeError:
        try:
            said = error.read(_CHUNK).decode(errors="replace")
        except OSError:
            said = ""
        asked = str(error.headers.get("Retry-After", ""))
        words = self._without_key(" ".join(f"HTTP {error.code} {error.reason}: {said}".split()))
        return JudgeError(
            words[:300],
            again=error.code in _AGAIN or error.code >= 500,
            too_many=error.code == 429,
            wait_s=float(asked) if asked.isdigit() else None,
        )

    def _without_key(self, text: str) -> str:
        """The text as it may be stored or shown: cut it afterwards, lest half a key is left."""
        forms = {self._key, urllib.parse.quote(self._key, safe=""), json.dumps(self._key)[1:-1]} - {""}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "***")
        return text

    def _read(self, reply: str) -> float:
        """The last score of a reply, as a share of the range."""
        settings = self._settings
        found = _of_json(reply, settings.json_key) if settings.json_key else _of_text(reply, self._pattern)
        low, high = settings.range
        if found is None or not math.isfinite(found) or not low <= found <= high:
            end = self._without_key(reply)[-80:]
            raise JudgeError(f"no score from {low:g} to {high:g} in the reply, which ends {end!r}")
        return (found - low) / (high - low)

    def _kept(self, name: str) -> str | None:
        """The reply to this request; None: never asked, or not kept."""
        try:
            kept = _cache(name).read(f"{name}.json") if self._settings.cache else None
            return str(json.loads(kept)["reply"]) if kept is not None else None
        except (RlhfsimError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _keep(self, name: str, reply: str) -> None:
        """Put the reply on disk, without the key, which a server may have echoed."""
        if not self._settings.cache:
            return
        kept = {"model": self._settings.model, "reply": self._without_key(reply)}
        with contextlib.suppress(RlhfsimError):  # a home that cannot be written to: asked again next time
            _cache(name).write(f"{name}.json", json.dumps(kept).encode())


def _cache(name: str) -> Cache:
    return Cache(cache_folder("judge") / name[:2], PRIVATE)


def _within(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """A body that ends in time: a server may send a byte now and then."""
    body = bytearray()
    while part := response.read1(_CHUNK):
        body += part
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(body) > MAX_REPLY:
            raise ValueError("too long")
    return bytes(body)


def _of_json(reply: str, key: str) -> float | None:
    """The number under `key` of the last JSON object of a reply."""
    for found in reversed(list(re.finditer(r"\{[^{}]*\}", reply))):
        try:
            value = json.loads(found[0])[key]
            return float(value) if isinstance(value, (int, float, str)) else None
        except (ValueError, KeyError, RecursionError, OverflowError):
            continue
    return None


def _of_text(reply: str, pattern: re.Pattern[str]) -> float | None:
    found = list(pattern.finditer(reply[-LOOKED_AT:]))
    try:
        return float(found[-1][1]) if found else None
    except (ValueError, TypeError):
        return None


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise RlhfsimError(
            "judge-key",
            f"the judge's key is to come from the environment variable {variable}, which is not set",
            help=f"export {variable}=... where launch starts, or leave judge.key_variable out",
        )
    return key


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise RlhfsimError(
            "judge-pattern", f"judge.pattern {text!r} is no regular expression: {error}"
        ) from None
    if pattern.groups < 1:
        raise RlhfsimError("judge-pattern", f"judge.pattern {text!r} has no group: (...) around the score")
    return pattern
