"""Options and the types of their values: a bad one becomes an error that names option, value and rule."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from rlhfsim import outputs, units
from rlhfsim.errors import Place, RlhfsimError, unknown_name
from rlhfsim.run_folder import is_plan_of_a_run
from rlhfsim.specs.loading import convert, parse_json
from rlhfsim.specs.ranges import FieldValues, taken, taken_by, whole

if TYPE_CHECKING:
    from rlhfsim.present.answers.tree import Page

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic for the type checker only (click < 8.2)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Option = Callable[[Any], Any]
Given = Mapping[str, Any]
"""Values of a command's parameters, by name."""
COMMAND_LINE = Place(file="command line")
MAX_NAME = 255
"""Bytes that a file system takes as one name."""


class PathName(click.Path):
    """A path that a file system can have."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        """Whether it may be a file, and whether a folder."""
        super().__init__(path_type=Path, file_okay=file_okay, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.

        Raises:
            RlhfsimError: a character or a length that no file name has.
        """
        if not value or "\0" in os.fspath(value):
            raise bad_option(f"{_name(param)}: {str(value)!r} is no path", "give a file or a folder")
        try:
            sizes = [len(os.fsencode(part)) for part in Path(value).parts]
        except UnicodeEncodeError as error:
            raise bad_option(
                f"{_name(param)}: {str(value)!r} is no path", "give a file or a folder"
            ) from error
        if any(size > MAX_NAME for size in sizes):
            raise bad_option(f"{_name(param)}: a name of more than {MAX_NAME} bytes", "give a shorter one")
        return super().convert(value, param, ctx)


PATH, FILE, FOLDER = PathName(), PathName(dir_okay=False), PathName(file_okay=False)


class Output(PathName):
    """A file that a command writes; `Command` checks it before the command works."""

    def __init__(self, kind: str | None, beside: Callable[[Path], dict[Path, str]] | None = None) -> None:
        """`kind`: of `outputs.MARKS`, an earlier one is replaced; `beside`: further files, their kinds."""
        super().__init__(dir_okay=False)
        self.kind, self.beside = kind, beside

    def files(self, path: Path) -> dict[Path, str | None]:
        """All that is written, with its kind; next to a device nothing is."""
        beside = self.beside(path) if self.beside and outputs.is_replaceable(path) else {}
        return {path: self.kind, **beside}


class NewFolder(PathName):
    """A folder that a command makes, or an empty one; `Command` checks it before the command works."""


class Told(NamedTuple):
    """What a command found."""

    page: Page
    met: bool = True
    """Else the exit code is 1."""


class Command(click.Command):
    """A command whose outputs replace neither its inputs nor files that it did not write; its answer is
    printed as `--json` and `--detail` ask for it."""

    def invoke(self, ctx: click.Context) -> Any:
        """What the command returns where that is no answer.

        Raises:
            RlhfsimError: an output cannot be written, or would replace what it must not.
        """
        given = [(param, ctx.params.get(param.name or "")) for param in self.params]
        inputs = [name for param, value in given if not _writes(param) for name in _names(value)]
        files: dict[Path, str | None] = {}
        for param, value in given:
            if isinstance(param.type, Output) and value is not None:
                check_output(value, param.type, inputs)
                if files.keys() & (mine := param.type.files(value)).keys():
                    raise bad_option(f"{param.opts[0]} {value}: two outputs in one file", "name two files")
                files |= mine
            if isinstance(param.type, NewFolder) and value is not None:
                outputs.check_new_folder(value)
        answer = super().invoke(ctx)
        if not isinstance(answer, Told):
            return answer
        reply(ctx.params, answer.page)
        ctx.exit(0 if answer.met else 1)


def command(epilog: str, name: str | None = None) -> Callable[[Callable[..., Any]], Command]:
    """What makes a function a command; `epilog`: its examples."""
    return click.command(name, cls=Command, epilog=epilog)


def is_typed(name: str) -> bool:
    """Whether a parameter of this command is given on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def check_output(out: Path, kind: Output, inputs: Iterable[Path | str] = ()) -> None:
    """That `out` and what is written along with it can be written, and replace no input and no foreign file.

    Raises:
        RlhfsimError: otherwise.
    """
    read = [path for path in map(Path, inputs) if outputs.is_file(path)]
    for path, name in kind.files(out).items():
        if outputs.is_file(path) and any(path.samefile(one) for one in read):
            raise RlhfsimError(
                "output-is-input",
                "the command reads this file, so it is not written over it",
                place=path,
                help="name another file for the output",
            )
        if is_plan_of_a_run(path):
            raise RlhfsimError(
                "output-in-run",
                "this is the plan of the run in its folder, whose trace is of no other",
                place=path,
                help="name a file outside the run's folder",
            )
        outputs.check_file(path, name)


def _writes(param: click.Parameter) -> bool:
    return isinstance(param.type, Output | NewFolder)


def _names(value: Any) -> list[Path | str]:
    """What may name a file in the value of a parameter."""
    values = value if isinstance(value, tuple) else (value,)
    return [one for one in values if isinstance(one, Path | str)]


def option(names: str, kind: Any, help: str, **more: Any) -> Option:
    """A click option of the `names` (`--gpu --profile gpu`), whose `kind` may be an annotated type; a default
    that says something is shown."""
    shown = more.get("default", "") not in ("", None)
    if not isinstance(kind, click.ParamType):
        kind = Words("TEXT") if kind in (None, str) else _kind(taken(kind))
    return click.option(*names.split(), type=kind, help=help, show_default=shown, **more)


def field_option(owner: type, name: str, help: str, **more: Any) -> Option:
    """The option of a field: its range, its choices and its default are those of the field.

    `{choices}` in the help is replaced by the choices.
    """
    values = taken_by(owner, name)
    more = {"default": values.default} | more
    text = help.format(choices=", ".join(values.choices))
    return option(f"--{name.replace('_', '-')}", _kind(values, name), text, **more)


def typed(hint: Any, number: type[Number]) -> Any:
    """The kind of an option that takes what an annotated type takes, in the way of `number`."""
    return _kind(taken(hint), number=number)


def _kind(values: FieldValues, name: str = "", number: type[Number] | None = None) -> Any:
    if values.choices:
        return OneOf(name.replace("_", " "), values.choices)
    if values.kind is str:
        return Words("NAME")
    assert values.low is not None
    assert values.high is not None
    if values.kind is int:
        return Whole(int(values.low), int(values.high))
    return (number or Number)(values.low, values.high, values.dimension)


def flag(names: str, help: str) -> Option:
    """An option without a value."""
    return click.option(*names.split(), is_flag=True, help=help)


def together(*options: Option) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help."""

    def apply(command: F) -> F:
        for decorate in reversed(options):
            command = decorate(command)
        return command

    return apply


json_option = flag("--json as_json", "Print the same content as JSON.")
DETAILS = ("time", "memory", "proof", "sure", "all")


def emit(
    as_json: bool,
    data: Callable[[], Any],
    show: Callable[[], Iterable[Any] | None],
    *,
    indent: int | None = 1,
) -> None:
    """The answer as JSON, or for people: what `show` returns is printed part by part."""
    if as_json:
        click.echo(json.dumps(data(), indent=indent))
        return
    from rlhfsim.present.terminal.console import console, put

    screen = console()
    for part in show() or ():
        put(screen, part)


def reply(given: Given, page: Page) -> None:
    """Print an answer as `--json` and `--detail` ask for it, and write the page that `--page` names."""
    if given.get("page"):
        from rlhfsim.present.html.page import write

        write(given["page"], page)
    emit(given["as_json"], lambda: page.as_data, lambda: _walked(page, given.get("detail", ())))


def _walked(page: Page, detail: Collection[str]) -> Iterable[Any]:
    from rlhfsim.present.terminal.console import console
    from rlhfsim.present.terminal.page import parts

    return parts(page, console().width, detail)


def bad_option(message: str, help: str) -> RlhfsimError:
    """An error about a value on the command line."""
    return RlhfsimError("bad-option", message, place=COMMAND_LINE, help=help)


@contextmanager
def on_command_line(prefix: str = "") -> Iterator[None]:
    """Errors without a place of their own get the command line as their place; `prefix` names the option."""
    try:
        yield
    except RlhfsimError as error:
        place = error.place if error.place and error.place.file != COMMAND_LINE.file else None
        message = f"{prefix}{error.message}" if place is None else error.message
        raise RlhfsimError(error.code, message, place=place or COMMAND_LINE, help=error.help) from error


_PAIRS = {
    "--prompt-len": "lognormal:mean=2000,sigma=0.8,max=8192",
    "--response-len": "lognormal:mean=2000,sigma=0.8,max=8192",
    "--rules": "seconds_per_sample=5ms,workers=64",
    "--environment": "turns=4,seconds_per_turn=0.5",
    "--speculation": "method=eagle,draft_tokens=3,acceptance=0.62",
}
"""Option -> pairs as it takes them, where they are not those of a layout."""


def parse_pairs(text: str, option: str) -> dict[str, str]:
    """`tp=8,dp=2` as a mapping; spaces around names and values do not matter.

    Raises:
        RlhfsimError: an item without `=`, without a name or value, or a name that is given twice.
    """
    pairs: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise bad_option(
                f"{option}: {item.strip()!r} is not name=value",
                f"write {option} {_PAIRS.get(option, 'tp=8,dp=2')}",
            )
        if name in pairs:
            raise bad_option(f"{option}: {name!r} is given twice", "give each name once")
        pairs[name] = value
    return pairs


def from_pairs(kind: type[T], pairs: Mapping[str, Any], option: str) -> T:
    """A spec from `name=value` pairs; errors name the option.

    Raises:
        RlhfsimError: an unknown name, a missing one, or a bad value.
    """
    with on_command_line(f"{option}: "):
        return convert(kind, parse_json(json.dumps(pairs), COMMAND_LINE.file))


def _name(param: click.Parameter | None) -> str:
    return param.opts[0] if param and param.opts else "value"


class Typed(ParamType):
    """Values that `read` makes of their text."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or the error of `read`."""
        return self.read(str(value), _name(param))

    def read(self, text: str, option: str) -> Any:
        """The value; errors name the option."""
        raise NotImplementedError


class Words(Typed):
    """Text, with the word that represents it in the help and what a shell offers after TAB."""

    def __init__(self, name: str, offered: Callable[..., list[CompletionItem]] | None = None) -> None:
        """`offered`: a function of `rlhfsim.cli.completion`."""
        self.name, self.offered = name, offered

    def read(self, text: str, option: str) -> str:
        """The text.

        Raises:
            RlhfsimError: a character that drives a terminal.
        """
        if not text.isprintable():
            raise bad_option(f"{option}: {text[:40]!r} holds a control character", "leave it out")
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """What begins so."""
        return self.offered(ctx, param, incomplete) if self.offered else []


class Whole(Typed):
    """A whole number in a range; thousands may be written 1,024 or 1_024."""

    name = "N"

    def __init__(self, low: int, high: int) -> None:
        """Both ends count."""
        self.low, self.high = low, high

    def read(self, text: str, option: str) -> int:
        """The number.

        Raises:
            RlhfsimError: no whole number, or outside the range.
        """
        try:
            return whole(text, self.low, self.high, option)
        except RlhfsimError as error:
            raise bad_option(error.message, error.help or "") from error


class Number(Typed):
    """A quantity in a range, in base units; text may carry a unit of its dimension."""

    name = "X"

    def __init__(self, low: float, high: float, dimension: units.Dimension = "1") -> None:
        """Both ends count."""
        self.low, self.high, self.dimension = low, high, dimension

    def read(self, text: str, option: str) -> float:
        """The number.

        Raises:
            RlhfsimError: no number, not finite, another unit, or outside the range.
        """
        rule = f"give a number from {self.low:,g} to {self.high:,g}"
        try:
            number = units.parse(text, self.dimension)
        except RlhfsimError as error:
            raise bad_option(f"{option}: {error.message}", rule) from error
        if not (math.isfinite(number) and self.low <= number <= self.high):
            raise bad_option(f"{option}: {text[:40]} is out of range", rule)
        return number


class OneOf(Typed):
    """A name of a closed list."""

    name = "NAME"

    def __init__(self, kind: str, names: Iterable[str]) -> None:
        """`kind` says in errors what the names are."""
        self.kind, self.names = kind, tuple(names)

    def read(self, text: str, option: str) -> Any:
        """The name in its own spelling.

        Raises:
            RlhfsimError: not in the list, with the nearest ones.
        """
        name = text.strip().lower()
        if name not in self.names:
            raise unknown_name(self.kind, text[:40], self.names, place=COMMAND_LINE)
        return name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names that begin so."""
        return [CompletionItem(n) for n in self.names if n.startswith(incomplete.lower())]


class Several(OneOf):
    """Names of a closed list, separated by commas."""

    name = "NAME,..."

    def read(self, text: str, option: str) -> frozenset[str]:
        """The names as a set.

        Raises:
            RlhfsimError: one that is not in the list.
        """
        items = [item for item in text.split(",") if item.strip()]
        return frozenset(OneOf.read(self, item, option) for item in items)


detail_option = option(
    "--detail", Several("part", DETAILS), f"More below the first screen: {', '.join(DETAILS)}.", default=""
)
