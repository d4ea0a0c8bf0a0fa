"""`rlhfsim desk`: a question that is moved in the browser, and its answer."""

from __future__ import annotations

import gc
import ipaddress
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl

import click

from rlhfsim.cli import completion
from rlhfsim.cli.buy import bought
from rlhfsim.cli.choose import candidates, choose
from rlhfsim.cli.constraints import requirements
from rlhfsim.cli.design import design, designed, question
from rlhfsim.cli.long_run import long_run
from rlhfsim.cli.params import Given, OneOf, Several, Whole, Words, bad_option, flag, on_command_line, option
from rlhfsim.cli.pool import pooled
from rlhfsim.cli.time_to_reward import OBJECTIVE, rewarded
from rlhfsim.desk.answer import DeskQuestion
from rlhfsim.desk.comparisons import Candidates
from rlhfsim.desk.files import DocumentAnswer, NamedFile
from rlhfsim.desk.state import Field, Kind, Question, arguments, of_search
from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import need
from rlhfsim.present import words
from rlhfsim.present.answers.buy import purchase_page
from rlhfsim.present.answers.pool import pool_page
from rlhfsim.present.answers.time_to_reward import reward_page
from rlhfsim.present.answers.tree import Page
from rlhfsim.search.requirements import narrowed
from rlhfsim.specs.loading import parse_yaml, read_text

EPILOG = """\b
Examples:
  rlhfsim desk
  rlhfsim desk --port 0
  rlhfsim desk --ask 'gpus=64&model=70b&algorithm=grpo'
"""
LOOPBACK = "127.0.0.1"
START = "gpus=64&model=70b&algorithm=grpo&prompts=256&samples=8&response-len=2k&steps=1000"
"""What is asked where no address says otherwise."""
ELSEWHERE = ("--out", "--json", "--help", "-h", "--why-not", "--gains", "--pareto", "--detail")
"""Options of `rlhfsim design` that the page has no use for."""
_FILE = re.compile(r"[/\\]|\.(ya?ml|json)\b|file=", re.IGNORECASE)
_LABELS = {
    "gpus": "GPUs",
    "gpu": "Kind of GPU",
    "model": "Model",
    "algorithm": "Algorithm",
    "prompts": "Prompts a step",
    "samples": "Responses each",
    "prompt-len": "Tokens of a prompt",
    "response-len": "Tokens of a response",
    "framework": "Framework",
    "backend": "Training backend",
    "steps": "Steps of the run",
    "deadline": "Deadline of the run",
    "budget": "Budget of the run",
    "allow": "May compete too",
    "more": "More options of rlhfsim design",
}
_HINTS = {"deadline": "7d", "budget": "50kUSD", "more": "--max-staleness 2 --fix actor.tp=8"}


@click.command(epilog=EPILOG)
@option("--port", Whole(0, 65535), "Port of the page; 0: one that is free.", default=8050)
@option(
    "--host",
    Words("ADDRESS"),
    "Address that is listened to. Another than the default lets everyone who reaches this machine use the "
    "page, and its CPU, without a password; files of this machine cannot be named then.",
    default=LOOPBACK,
)
@option("--ask", Words("QUERY"), "The first question, as the page's address has it after `?`.", default=START)
@flag("--open", "Open the page in the browser of this machine.")
def desk(port: int, host: str, ask: str, open: bool) -> None:
    """Move a question in the browser and watch the answer.

    The page runs on this machine until Ctrl-C and needs no network. Its address holds the question.
    """
    need("dash", purpose="the desk")
    from rlhfsim.desk.server import Server

    gc.enable()
    with on_command_line("--ask: "):
        of_search(ask, FIELDS)
    local = is_loopback(host)
    server = Server(
        host,
        port,
        fields=FIELDS,
        read=partial(asked, files=local),
        candidates=partial(elsewhere, files=local),
        documents=partial(of_documents, files=local),
        start=ask,
        files=local,
    )
    with server:
        click.echo(f"{server.address}  (Ctrl-C ends it)")
        if not local:
            click.echo(f"whoever reaches {host} can use this page: it asks for no password", err=True)
        if open:
            click.launch(server.address)
        server.run()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address.

    Raises:
        RlhfsimError: it is no address of a machine.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise bad_option(
            f"--host {host[:40]!r} is no IP address", f"give {LOOPBACK}, or 0.0.0.0 for every network"
        ) from error


def asked(query: str, *, files: bool) -> DeskQuestion:
    """The question of an address, read as `rlhfsim design` reads its options; `files`: they may name some.

    Raises:
        RlhfsimError: what `rlhfsim design` says to these options.
    """
    state = of_search(query, FIELDS)
    given = parsed(state.question, files=files)
    request = question(given)
    targets = requirements(given, request)
    return DeskQuestion(
        request=narrowed(request, targets),
        designed=lambda explain: designed(request, targets, (), given, explain=explain),
        targets=targets,
        steps=given["steps"],
        confidence=given["confidence"],
    )


def elsewhere(query: str, *, files: bool) -> Candidates:
    """The candidates of a query, read as `rlhfsim choose` reads its options.

    Raises:
        RlhfsimError: what `rlhfsim choose` says to these options.
    """
    given = parsed(dict(parse_qsl(query)), files=files, command=choose)
    asked, targets = candidates(given)
    return Candidates(
        asked=tuple(asked), targets=targets, steps=given["steps"], confidence=given["confidence"]
    )


def of_documents(query: str, named: tuple[NamedFile, ...], *, files: bool) -> DocumentAnswer:
    """The answer to files of a run, of jobs of a pool, of a purchase or of a reward to reach.

    The options of the query go with those of a run and of a reward, its GPUs with a pool.

    Raises:
        RlhfsimError: what `rlhfsim design`, `pool` and `buy` say to them, or files of several questions.
    """
    fields = of_search(query, FIELDS).question
    with TemporaryDirectory(prefix="rlhfsim-") as folder:
        kinds: dict[str, list[Path]] = {}
        for name, text in named:
            path = Path(folder) / name
            path.write_text(text)
            if path.suffix != ".csv":
                kinds.setdefault(_kind_of(path, [n for n, _ in named], files=files), []).append(path)
        if len(kinds) != 1 or (len(paths := next(iter(kinds.values()))) > 1 and "pool" not in kinds):
            raise RlhfsimError(
                "one-question",
                f"these files ask {words.listed(list(kinds)) or 'nothing'} at once",
                help="give one file of a run, a purchase or a reward, or the jobs of one pool",
            )
        [kind] = kinds
        left_out = _LEFT_OUT[kind]
        asked = {name: text for name, text in fields.items() if name not in left_out}
        page = _ANSWERS[kind](parsed(asked, files=files), paths)
        return DocumentAnswer(page, _typed(kind, asked, [path.name for path in paths]))


def _kind_of(path: Path, names: Sequence[str], *, files: bool) -> str:
    """What a file asks, by its keys; `files`: it may name others than `names`.

    Raises:
        RlhfsimError: it asks nothing that is known, or names a file.
    """
    data = parse_yaml(read_text(path), path.name).data
    if not files and (other := next((f for f in _file_names(data) if f not in names), None)):
        raise bad_option(f"{other[:60]!r} names a file", "files are read only where --host is this machine")
    keys = set(data) if isinstance(data, dict) else set()
    kind = next((kind for kind, known in _KEYS.items() if known <= keys), None)
    if kind is None:
        raise RlhfsimError(
            "unknown-question",
            f"{path.name} is no file of a run, a job, a purchase or a reward",
            help="; ".join(f"{kind}: {', '.join(sorted(known))}" for kind, known in _KEYS.items()),
        )
    return kind


def _file_names(data: Any) -> Iterator[str]:
    """Texts of a file that could name another; where a figure comes from may be an address."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from () if key in ("source", "title") else _file_names(value)
    elif isinstance(data, list):
        for value in data:
            yield from _file_names(value)
    elif isinstance(data, str) and _FILE.search(f"{data} file=" if data.endswith(".csv") else data):
        yield data


def _run(given: Given, paths: Sequence[Path]) -> Page:
    return long_run(question(given), {**given, "run": paths[0]})[1]


def _pool(given: Given, paths: Sequence[Path]) -> Page:
    return pool_page(pooled(tuple(paths), given))


def _purchase(given: Given, paths: Sequence[Path]) -> Page:
    return purchase_page(bought(paths[0], given["confidence"]))


def _reward(given: Given, paths: Sequence[Path]) -> Page:
    return reward_page(rewarded(question(given), {**given, "learning": paths[0]}))


def _typed(kind: str, asked: Question, names: Sequence[str]) -> str:
    """The command for the same answer."""
    if kind == "purchase":
        return shlex.join(["rlhfsim", "buy", *names])
    if kind == "pool":
        pool = {name: text for name, text in asked.items() if name in ("gpus", "gpu")}
        return shlex.join(["rlhfsim", "pool", *names, *arguments(pool)])
    given = ["--run"] if kind == "run" else ["--objective", OBJECTIVE, "--learning"]
    return shlex.join(["rlhfsim", "design", *arguments(asked), *given, *names])


_KEYS = {"purchase": {"jobs"}, "pool": {"workload"}, "reward": {"target"}, "run": {"steps"}}
"""Keys that no file of another kind has, in the order in which they are looked for."""
_LEFT_OUT = {"purchase": (), "pool": (), "run": ("steps",), "reward": ("steps", "deadline", "budget")}
"""Fields of the question that a kind has no use for."""
_ANSWERS: Mapping[str, Callable[[dict[str, Any], Sequence[Path]], Page]] = {
    "purchase": _purchase,
    "pool": _pool,
    "run": _run,
    "reward": _reward,
}


def parsed(fields: Question, *, files: bool, command: click.Command = design) -> dict[str, Any]:
    """Values of the options of `rlhfsim design`, or of another command.

    Raises:
        RlhfsimError: a bad value, an option that is not known or of no use here, or a file.
    """
    words, name = arguments(fields), str(command.name)
    if not files and (named := next(filter(_FILE.search, words), None)):
        raise bad_option(f"{named[:60]!r} names a file", "files are read only where --host is this machine")
    for word in words:
        if (option_name := word.split("=")[0]) in ELSEWHERE:
            raise bad_option(f"{option_name} is of no use on this page", "leave it out, or use a terminal")
    try:
        return command.make_context(name, words).params
    except click.ClickException as error:
        raise bad_option(error.format_message(), f"rlhfsim {name} --help lists the options") from error


def _fields() -> Mapping[str, Field]:
    options = {p.opts[0].removeprefix("--"): p for p in design.params}
    return {name: _field(name, label, options.get(name)) for name, label in _LABELS.items()}


def _field(name: str, label: str, param: click.Parameter | None) -> Field:
    if param is None:
        return Field(name=name, label=label, hint=_HINTS[name])
    hint = str(param.default) if isinstance(param.default, str | int) else _HINTS.get(name, "")
    if isinstance(param.type, OneOf):
        several: Kind = "several" if isinstance(param.type, Several) else "one"
        return Field(name=name, label=label, hint=hint, kind=several, offered=param.type.names)
    listed = {"gpu": completion.gpus, "model": completion.models}.get(name)
    context = click.Context(design)
    offered = tuple(str(item.value) for item in listed(context, param, "")) if listed else ()
    return Field(name=name, label=label, hint=hint, offered=offered)


FIELDS = _fields()
"""Name -> field, in the order of the page."""
