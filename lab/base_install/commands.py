"""Commands as texts recommend them, made runnable: small questions, names of files that are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from html import unescape

from rlhfsim.cli.main import COMMANDS
from tests.cli.test_recommended_commands import COMMAND, END, PLACEHOLDER, recommended

SMALL_BASE = "--set workload.model=0.5b --set cluster.node_groups.0.gpus=4"
SMALLER = (
    (r"--model \S*\d[bB]\S*", "--model 0.5b"),
    (r"--gpus \d+\.\.\d+", "--gpus 1..2"),
    (r"--gpus \d+(?!\d*\.)", "--gpus 4"),
    (r"--max-gpus \d+", "--max-gpus 2"),
    (r"--gpu h100,h200,b200,a100-80,mi300x", "--gpu h100,mi300x"),
    (r"--replications \d+", "--replications 2"),
    (r"((?:actor|--actor|--rollout)[ .]tp)=[48]", r"\1=2"),
    (r"rollout\.tp=8", "rollout.tp=1"),
    (r" --(?:set workload\S+|set cluster\S+|jobs \d+)", ""),
    (r"^whatif (?!--)(\S+)", rf"whatif \1 {SMALL_BASE} --jobs 1"),
    (rf"(my-scenario.yaml) {SMALL_BASE}", r"\1"),
    (r"^size (?!.*--max-gpus)", "size --max-gpus 2 "),
    (r"^validate$", "validate --kind memory"),
)
"""What makes a recommended question one of seconds."""
QUICK = ("sync", "models", "gpus", "doctor")
"""Commands whose questions are small as they are."""
PLACEHOLDERS = {
    "FILE": "plan.json",
    "PLAN": "plan.json",
    "NEW": "new.json",
    "KIND": "h100",
    "LOG": "job.log",
    "LOGS": "job.log",
    "SCENARIO": "half-the-gpus",
    "RUN/plan.json": "plan.json",
    "FOLDER": "model",
}
"""Word of a text -> what is there."""
ARGUMENTS = {"verl", "openrlhf", "h100", "local", "model", "run", "measure", "half-the-gpus", "h100-to-b200"}
"""Plain words that are arguments; any other goes on with the sentence."""
ALONE = {"gpus", "models", "prices", "frameworks", "validate", "desk", "demo"}
"""Commands that are whole without any argument."""
FLAGS = {"--json", "--resume", "--run", "--dry-run", "--pareto", "--no-sizes", "--quick", "--ray"}
_UNSAID = re.compile(rf"\[|\b{PLACEHOLDER}\b|\.\.\.|\.\. ?$|\bN\b")
"""What only the reader can say."""


def documented(*places: str) -> list[str]:
    """The commands, without `rlhfsim`, in strings of the product and in pages whose place begins so."""
    texts = [f"{found.verb}{found.rest}" for found in recommended() if found.where.startswith(places)]
    return list(dict.fromkeys(small for text in texts if (small := runnable(text)) is not None))


def shown(output: str) -> Iterator[str]:
    """The commands that an answer or an error recommends."""
    for match in COMMAND.finditer(output):
        end = END.search(match[2])
        command = runnable(f"{match[1]}{match[2][: end.start()] if end else match[2]}")
        if command is not None:
            yield command


def on_page(page: str) -> str:
    """The text of a page that a command wrote, a line for each element."""
    return unescape(re.sub(r"<[^>]*>", "\n", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)))


def runnable(text: str) -> str | None:
    """A command on files that are there; None for one that is not whole, or only named in a sentence."""
    text = re.split(r"\s{3,}", text.strip())[0].rstrip(",.:")
    for pattern, small in () if text.startswith(QUICK) else SMALLER:
        text = re.sub(pattern, small, text)
    try:
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text)]
    except ValueError:  # cut inside quotes
        return None
    whole = bool(words) and words[0] in COMMANDS and not _UNSAID.search(text) and _is_whole(words)
    return shlex.join(words) if whole else None


def _is_whole(words: list[str]) -> bool:
    """Whether nothing that the command needs is left to the reader, and no sentence goes on behind it."""
    valued = {i + 1 for i, word in enumerate(words) if word.startswith("--") and word not in FLAGS}
    arguments = [word for i, word in enumerate(words) if i and i not in valued and not word.startswith("-")]
    if max(valued, default=0) == len(words):
        return False  # an option whose value is not said
    if any(re.fullmatch(r"[a-z]+", word) and word not in ARGUMENTS for word in arguments):
        return False
    asked = {"--model", "--run"} & {*words}
    needed = {"launch": bool(arguments), "design": "--gpus" in words}
    return bool(arguments or asked or words[0] in ALONE) and needed.get(words[0], True)
