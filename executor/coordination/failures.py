"""What can go wrong while a run goes on, said with the name of the part that failed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rlhfsim.errors import RlhfsimError

Cause = Literal["died", "raised", "timed out"]
LOG_TAIL = 20_000
"""Characters of a log that are looked at."""
_CAUSE = re.compile(
    r"^(Fatal Python error|terminate called|\s*what\(\):|[\w.]*(Error|Exception)\b)|[Aa]ssertion .*failed"
)
"""How interpreter, C++ and libraries begin the line that says why."""
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|socket|timed? ?out", re.IGNORECASE
)
"""What a rank says that lost its partner."""
ECHO_S = 2.0
"""How long one that lost its partner waits for the word of the partner."""
LOOK_S = 1.0
"""Between two looks at calls that run."""
RESTART_HELPS = (
    "weight-sync-failed",
    "weight-sync-timeout",
    "weight-sync-checksum",
    "weight-sync-version",
    "engine-broken",
    "host-memory-not-pinned",
)
"""Codes of errors that tell of a lost partner or of a rank's machine, not of bad input."""


class PartFailed(Exception):
    """A worker, replica or reward process failed; the run restarts from its last good state or stops."""

    def __init__(self, part: str, cause: Cause, detail: str, call: str = "") -> None:
        """`part` as in `actor rank 1`; `detail` is one line; `call` is what it was doing."""
        super().__init__(part, cause, detail, call)
        self.call = call
        self.part = part
        self.cause = cause
        self.detail = detail

    def __str__(self) -> str:
        doing = f" in {self.call}" if self.call else ""
        return f"{self.part} {self.cause}{doing}: {self.detail}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def collect(refs: Sequence[Any], parts: Sequence[str], what: str, limit_s: float) -> list[Any]:
    """Results of calls that run together, in order; the first failure that is seen ends the wait.

    Ranks that wait in a collective for a dead one would block for ever, so nobody waits for them: who is done
    is looked at every second, and all at once, for a look costs as much for one call as for hundreds.

    Raises:
        PartFailed: one died, raised or was not done after `limit_s`.
        RlhfsimError: one refused its input.
    """
    deadline = time.monotonic() + limit_s
    results: dict[Any, Any] = {}
    names = dict(zip(refs, parts, strict=True))
    pending = list(refs)
    while pending:
        if not ray.is_initialized():  # the attempt is over, and ray.wait would start a cluster
            raise PartFailed(names[pending[0]], "died", "the run left the cluster", what)
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=LOOK_S)
        try:
            results |= _results(done, names, what)
        except PartFailed as failure:
            raise _root(failure, pending, names, what) from failure.__cause__
        if pending and time.monotonic() > deadline:
            late = ", ".join(names[ref] for ref in pending[:4]) + ", ..." * (len(pending) > 4)
            raise PartFailed(late, "timed out", f"{what} took longer than {limit_s:g} s", what)
    return [results[ref] for ref in refs]


def answers(refs: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The value of each, or in its place the error of one that failed or is not done in time."""
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=limit_s)
    found: dict[str, Any] = {}
    for name, ref in refs.items():
        try:
            found[name] = ray.get(ref, timeout=0)
        except (RayError, GetTimeoutError) as error:
            found[name] = error
    return found


def _root(failure: PartFailed, pending: Sequence[Any], names: Mapping[Any, str], what: str) -> PartFailed:
    """The failure that made a rank lose its partner, where one of the others tells it soon; else this one."""
    if failure.cause != "raised" or not pending or not _ECHO.search(failure.detail):
        return failure
    for ref in ray.wait(list(pending), num_returns=len(pending), timeout=ECHO_S)[0]:
        try:
            _result(ref, names[ref], what)
        except PartFailed as other:
            if other.cause == "died" or not _ECHO.search(other.detail):
                return other
    return failure


def _results(refs: Sequence[Any], names: Mapping[Any, str], what: str) -> dict[Any, Any]:
    """Results of calls that are done, fetched together; the first that failed is raised by name."""
    try:
        return dict(zip(refs, ray.get(list(refs), timeout=LOOK_S), strict=True))
    except RayError:
        failures, results = list[PartFailed](), dict[Any, Any]()
        for ref in refs:
            try:
                results[ref] = _result(ref, names[ref], what)
            except PartFailed as failure:
                failures.append(failure)
        for root in sorted(failures, key=lambda f: f.cause == "raised" and bool(_ECHO.search(f.detail))):
            raise root from root.__cause__  # the first that is no echo of another rank's end
        return results


def _result(ref: Any, part: str, what: str) -> Any:
    try:
        return ray.get(ref, timeout=LOOK_S)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RlhfsimError):
            if cause.code in RESTART_HELPS:
                raise PartFailed(part, "raised", cause.message, what) from error
            raise cause from None
        raise PartFailed(part, "raised", _last_line(error), what) from error
    except RayActorError as error:
        raise died(part, error, what) from error
    except (GetTimeoutError, RayError) as error:
        raise PartFailed(part, "raised", _last_line(error), what) from error


def died(part: str, error: RayActorError, what: str = "") -> PartFailed:
    """The failure of a part whose process is gone, with what Ray knows of it."""
    text = str(error)
    pid, host = (re.search(rf"\b{name}: (\S+)", text) for name in ("pid", "ip"))
    where = f" on {host[1]}" if host else ""
    if "node has died" in text or "node was terminated" in text:
        node = re.search(r"Node Id: (\w+)", text)
        return node_lost(part, node[1] if node else "", where, what)
    if "creation task" in text:  # an exception of its constructor, whose traceback follows
        return PartFailed(part, "died", f"its process did not start: {text.strip().splitlines()[-1]}", what)
    said = last_words(int(pid[1])) if pid and pid[1].isdigit() else ""
    process = f"its process {pid[1]}{where} ended{said and f': {said}'}" if pid else _last_line(error)
    return PartFailed(part, "died", process, what)


def session_logs() -> Path | None:
    """Where the processes of a cluster that was started here write."""
    from ray._private.worker import _global_node

    return None if _global_node is None else Path(_global_node.get_logs_dir_path())


def last_words(pid: int) -> str:
    """Why a process of this node ended, by its standard error; empty: not known."""
    logs = session_logs()
    for path in logs.glob(f"worker-*-{pid}.err") if logs is not None else ():
        with suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].splitlines()
            return next((line.strip()[:300] for line in reversed(lines) if _CAUSE.search(line)), "")
    return ""


def node_lost(part: str, node_id: str, where: str = "", what: str = "") -> PartFailed:
    """The failure of a part whose Ray node went, with everything on it."""
    return PartFailed(part, "died", f"its Ray node {node_id[:8]}{where} is gone", what)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        (lines[-1] if isinstance(error, RayTaskError) else lines[0])[:300] if lines else type(error).__name__
    )
