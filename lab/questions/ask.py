"""A drawn question asked of every command in turn, and what is wrong with the answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lab.questions.draw import Question
from rlhfsim.cli import main as command_line
from rlhfsim.search.parallel import serial

CPU_LIMIT_S = 60.0
"""Largest CPU time of a question with all that is asked after it."""
END_AT_CPU_S, WALL_LIMIT_S = 90.0, 900.0
"""A question that has used this much is ended from outside."""
SAME_STEP = 1e-6
"""Largest relative difference between two commands' seconds of one step."""
SAME_STEP_READ_BACK = 0.01
"""The same, where a framework's own keys carried the plan."""
NO_NUMBER = re.compile(r"(?<![\w.-])(nan|-?inf|-?Infinity|NaN)(?![\w-])")
NOT_WRITTEN = ("algorithm-not-exported", "pool-is-not-whole-nodes")
"""Errors of an export that `design` says before, in the line of who runs the plan."""
ALLOWED_CODES = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What one command answered."""

    words: tuple[str, ...]
    code: int
    text: str
    """Text of both streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """An answer that must not be."""

    number: int
    kind: str
    command: str
    what: str


def ask_here(question: Question, folder: Path) -> tuple[list[Defect], float, str]:
    """The same as `ask` in this process, which forks none: nothing ends a question that does not end."""
    folder.mkdir()
    before, started = Path.cwd(), time.process_time()
    os.chdir(folder)
    try:
        with serial():
            outcome, rows = _found(question)
    finally:
        os.chdir(before)
    return _defects(question, rows, cpu_s := time.process_time() - started), cpu_s, outcome


def ask(question: Question, folder: Path) -> tuple[list[Defect], float, str]:
    """The defects of a question, CPU seconds of its processes, and how its design ended.

    It runs in a process of its own, whose children are ended with it.
    """
    folder.mkdir()
    before = _children_cpu_s()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        code = 1
        try:
            (folder / "found.json").write_text(json.dumps(_found(question)))
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended = _wait(child)
    cpu_s = _children_cpu_s() - before
    if not (folder / "found.json").exists():
        kind = "crash" if ended else "slow"
        out = folder / "out"
        tail = out.read_text(errors="replace")[-2000:] if out.exists() else ""
        what = f"{cpu_s:.0f} s of CPU, then ended from outside" if not ended else tail
        return [Defect(number=question.number, kind=kind, command=_design(question), what=what)], cpu_s, kind
    outcome, rows = json.loads((folder / "found.json").read_text())
    return _defects(question, rows, cpu_s), cpu_s, outcome


def _design(question: Question) -> str:
    return " ".join(("design", *question.words))


def _defects(question: Question, rows: Sequence[Sequence[str]], cpu_s: float) -> list[Defect]:
    """The defects of (kind, command, what), and that of a question that took too long."""
    late = [("slow", _design(question), f"{cpu_s:.0f} s of CPU")] * (cpu_s > CPU_LIMIT_S)
    return [Defect(number=question.number, kind=k, command=c, what=w) for k, c, w in (*rows, *late)]


def _children_cpu_s() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait(child: int) -> bool:
    """Whether the child ended by itself within its CPU and wall time; its process group is gone in any case."""
    started, ended = time.monotonic(), False
    while not ended and time.monotonic() - started < WALL_LIMIT_S and _tree_cpu_s(child) < END_AT_CPU_S:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return ended


def _tree_cpu_s(child: int) -> float:
    """CPU seconds of a process, of its children that run and of those that have ended."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(child)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


# --- one question ---------------------------------------------------------------------------------


def _found(question: Question) -> tuple[str, list[tuple[str, str, str]]]:
    """How the design ended, and (kind, command, what) of every defect."""
    answers: list[Answered] = []
    rows: list[tuple[str, str, str]] = []
    for kind, answer, what in _conversation(question, answers):
        rows.append((kind, " ".join(answer.words), what))
    for answer in answers:
        rows += [(kind, " ".join(answer.words), what) for kind, what in _wrong(answer)]
    first = answers[0]
    error = re.search(r"error\[([\w-]+)\]", first.text)
    return (f"{first.code} {error[1]}" if first.code == 2 and error else str(first.code)), rows


def _conversation(question: Question, answers: list[Answered]) -> Iterator[tuple[str, Answered, str]]:
    """Asks; what two answers contradict each other in."""

    def asked(*words: str) -> Answered:
        answers.append(_run(words))
        return answers[-1]

    design = asked("design", *question.words, "--out", "plan.json", *question.view)
    if design.code not in (0, 1) or not Path("plan.json").exists():
        if design.code == 0:
            yield "no plan", design, "exit code 0 and no plan.json"
        return
    plan = json.loads(Path("plan.json").read_text())
    step_s = plan["prediction"]["step_s"]
    if question.view == ("--json",):
        yield from _same_step(design, step_s, SAME_STEP)
    estimate = asked("estimate", "plan.json", "--json")
    yield from _same_step(estimate, step_s, SAME_STEP)
    fits = estimate.code in (0, 1) and json.loads(estimate.text)["fits"]
    if design.code == 0 and estimate.code != 0:
        yield (
            "contradiction",
            estimate,
            f"design ended with 0, estimate with {estimate.code}: {estimate.text[-300:]}",
        )
    for name in question.after:
        yield from _after(name, question, design, plan, fits, asked)


def _after(
    name: str, question: Question, design: Answered, plan: dict[str, Any], fits: bool, asked: Any
) -> Iterator[tuple[str, Answered, str]]:
    match name:
        case "report":
            answer = asked("report", "plan.json", "--no-sizes", "--out", "page.html")
            yield from _ends_with(0, answer, "a plan without a report")
        case "memory":
            yield from _ends_with(
                0 if fits else 1, asked("memory", "plan.json"), f"fits: {fits} (estimate), memory"
            )
        case "simulate":
            answer = asked("simulate", "plan.json", "--iterations", "3", "--json")
            yield from _ends_with(0 if fits else 1, answer, f"fits: {fits} (estimate), simulate")
        case "sync":
            yield from _sync(plan, asked)
        case "diff":
            answer = asked("diff", "plan.json", "plan.json")
            yield from _ends_with(0, answer, "a plan that differs from itself")
        case "export":
            yield from _export(question, design, plan, fits, asked)


def _ends_with(code: int, answer: Answered, otherwise: str) -> Iterator[tuple[str, Answered, str]]:
    if answer.code != code:
        yield "contradiction", answer, f"{otherwise}: {answer.code}"


def _export(
    question: Question, design: Answered, plan: dict[str, Any], fits: bool, asked: Any
) -> Iterator[tuple[str, Answered, str]]:
    framework = plan.get("framework", "rlhfsim")
    known = framework not in ("rlhfsim", "any")
    to = framework if known else question.exported_to
    answer = asked("export", "plan.json", "--to", to, "--out", "exported")
    named = f"rlhfsim export plan.json --to {to}" in design.text
    unwritten = answer.code == 2 and any(f"error[{code}]" in answer.text for code in NOT_WRITTEN)
    if named or (known and not unwritten):
        yield from _ends_with(0, answer, f"a plan of {to} that {to} is not given")
    if answer.code == 0:
        yield from _doctor(plan, to, fits, plan["prediction"]["step_s"], asked)


def _sync(plan: dict[str, Any], asked: Any) -> Iterator[tuple[str, Answered, str]]:
    """That `sync` prices the plan's own weight path between its own ends as its step does."""
    words = sync_words(plan)
    if words is None:
        return
    answer = asked("sync", *words, "--json")
    if answer.code != 0:
        yield "contradiction", answer, f"ends of a plan without a path: {answer.code}"
        return
    path, planned_s = plan["placement"]["weight_path"], sync_s(plan)
    offered = [
        p["seconds"] for p in json.loads(answer.text)["paths"] if (p["path"], p["available"]) == (path, True)
    ]
    if not any(abs(seconds - planned_s) <= SAME_STEP * planned_s for seconds in offered):
        yield "contradiction", answer, f"{path} takes {planned_s:.9g} s in plan.json, {offered} here"


def sync_s(plan: dict[str, Any]) -> float:
    """Seconds of the weight sync of a plan.json, hidden or not."""
    phases = (p for p in plan["prediction"]["phases"] if p["name"] == "actor.sync")
    return float(sum(p["work_s"] or p["seconds"] for p in phases))


def sync_words(plan: dict[str, Any]) -> tuple[str, ...] | None:
    """The two ends of a plan.json in the words of `rlhfsim sync`; None where nothing is moved, and where it has
    no word for the network between them."""
    placement, lora = plan["placement"], plan["workload"]["lora"]
    actor, rollout, hardware = placement["actor"], placement.get("rollout"), plan["hardware"]
    if not rollout or len(hardware) > 1 or plan["oversubscription"] > 1:
        return None
    return (
        *("--model", plan["workload"]["model"], "--backend", placement["backend"]),
        *("--gpu", hardware[0]["profile"], "--gpus-per-node", str(hardware[0]["gpus_per_node"])),
        *("--from", _degrees(actor["layout"], "zero"), "--to", _degrees(rollout["layout"], "precision")),
        *(("--same-pool",) if actor["pool"] == rollout["pool"] else ()),
        *(("--lora", str(lora["rank"])) if lora else ()),
        *(("--framework", plan["framework"]) if plan.get("framework") else ()),
    )


def _degrees(layout: dict[str, Any], more: str) -> str:
    """A layout in the words of `sync`."""
    names = ("tp", "pp", "dp", "cp", "ep", "etp", "attention_dp", more)
    return ",".join(f"{name}={layout[name]}" for name in names if layout.get(name) is not None)


def _doctor(
    plan: dict[str, Any], to: str, fits: bool, step_s: float, asked: Any
) -> Iterator[tuple[str, Answered, str]]:
    script = next(
        (p for p in sorted(Path("exported").iterdir()) if p.suffix in (".sh", ".yaml") and "run" in p.name),
        None,
    )
    if script is None:
        return
    gpu = plan["hardware"][0]["profile"]
    answer = asked("doctor", str(script), "--framework", to, "--gpu", gpu, "--json")
    if answer.code not in (0, 1):
        yield "contradiction", answer, f"doctor does not read what export wrote: {answer.code}"
        return
    if (answer.code == 0) != fits:
        yield "contradiction", answer, f"fits: {fits} (estimate), {answer.code} (doctor of the export)"
    yield from _same_step(answer, step_s, SAME_STEP_READ_BACK)


def _same_step(answer: Answered, step_s: float, within: float) -> Iterator[tuple[str, Answered, str]]:
    """That the JSON of `answer` says this step."""
    if answer.code not in (0, 1):
        return
    try:
        said = _step_of(json.loads(answer.text))
    except json.JSONDecodeError:
        yield "no JSON", answer, answer.text[:200]
        return
    if said is not None and abs(said / step_s - 1) > within:
        yield "contradiction", answer, f"step {step_s:.9g} s in plan.json, {said:.9g} s here"


def _step_of(answer: Any) -> float | None:
    """Seconds of a step: of the plan that an answer in JSON is about."""
    for path in (("plan", "prediction", "step_s"), ("chosen", "prediction", "step_s"), ("step_s",)):
        value = answer
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _wrong(answer: Answered) -> Iterator[tuple[str, str]]:
    """What no answer may have, whatever was asked."""
    if "Traceback (most recent call last)" in answer.text or answer.code not in ALLOWED_CODES:
        yield "traceback", answer.text[-1500:]
    elif answer.code == 2 and not re.search(r"^error\[[\w-]+\]|^Error: ", answer.text, re.MULTILINE):
        yield "unclear", answer.text[-500:]
    elif answer.code == 2 and answer.words[0] == "design" and _unplaced(answer.text):
        yield "unclear", f"an error of a part of the answer, not of the question: {answer.text[-500:]}"
    elif found := NO_NUMBER.search(answer.text):
        line = answer.text[: found.end()].rsplit("\n", 1)[-1]
        yield "no number", f"{found[0]} in {line[-120:]!r}"


def _unplaced(text: str) -> bool:
    """Whether an error does not say where in what was typed it is."""
    return re.search(r"^error\[", text, re.MULTILINE) is not None and "\n  --> " not in text


def _run(words: tuple[str, ...]) -> Answered:
    """One command in this process, its streams in a file."""
    sys.argv = ["rlhfsim", *words]
    with open("out", "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code: object = 0
        try:
            command_line.main()
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, to in zip(kept, (1, 2), strict=True):
                os.dup2(stream, to)
                os.close(stream)
    number = code if isinstance(code, int) else 1
    return Answered(words=words, code=number, text=Path("out").read_text(errors="replace"))
