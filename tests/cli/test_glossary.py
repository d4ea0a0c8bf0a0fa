"""The words of the command line, its messages and the docs are those of docs/glossary.md."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from rlhfsim.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST = 60
BANNED = (
    *("seat", "frame", "corner", "dive", "flip", "book", "world", "crew"),
    *("lives", "zygote", "cage", "machinery"),
)
"""Words that stand for something that has a name in the field."""
WORDS = re.compile(rf"(?<![a-z])({'|'.join(BANNED)})s?(?![a-z])", re.IGNORECASE)
ALLOWED = {
    r"world[_ ]size": "torch.distributed and launchers call the number of ranks so",
    r"\bto_frame\(": "pandas calls its table a DataFrame",
    r"\bdata ?frames?\b": "pandas calls its table a DataFrame",
    r"frame-ancestors": "a directive of a page's content security policy",
    r"world mean": "of the planet: grams of CO2 per kWh",
}
"""What may contain a banned word, and why."""
NAMES_KEPT = {
    ("rlhfsim/plan.py", "seat"): "read from plans of schema rlhfsim.plan/1",
    ("rlhfsim/choice.py", "seat"): "read from plans of schema rlhfsim.plan/1",
    ("rlhfsim/choice.py", "flips"): "read from plans of schema rlhfsim.plan/1",
    (
        "rlhfsim/kernels/grid.py",
        "_corners",
    ): "corners of a cell of the grid, in geometry; no key of an output",
    (
        "executor/coordination/checkpoints.py",
        "world",
    ): "ranks by role, as torch.distributed says; a file of the run",
}
"""Names in the code that stay, and why."""


def terms() -> dict[str, str]:
    """Every word of the page with its meaning."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    return {word: meaning for word, meaning, _ in rows if word != "word"}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and sub-command by name."""
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", each) for sub, each in command.commands.items())


@cache
def help_text() -> str:
    """`--help` of everything."""
    texts = [cli.get_help(click.Context(cli))]
    return "\n".join(
        texts + [command.get_help(click.Context(command, info_name=n)) for n, command in commands()]
    )


def option_words() -> Iterator[tuple[str, str]]:
    """Command, and a name, metavar or choice of one of its options."""
    for name, command in commands():
        for param in command.params:
            yield from ((name, option.lstrip("-")) for option in param.opts)
            if param.metavar:
                yield name, param.metavar
            choices = getattr(param.type, "names", None) or getattr(param.type, "choices", None) or ()
            yield from ((name, str(choice)) for choice in choices)


def joined(word: str) -> str:
    """A word whatever its spelling: `weight-path`, `Weight path` and `weightpath` are one."""
    return re.sub(r"[^a-z0-9]", "", word.lower()).removesuffix("s")


def parts(word: str) -> Iterator[str]:
    """A word of the command line, and its pieces of one to three words."""
    pieces = [piece for piece in re.split(r"[-_ .=<>,\[\]]+", word) if piece]
    for length in (1, 2, 3):
        yield from (" ".join(pieces[i : i + length]) for i in range(len(pieces) - length + 1))


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Strings of a module that are no docstrings, and names of dataclass fields (keys of JSON)."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id


def banned(text: str) -> list[str]:
    """Banned words of a text, each with what stands around it."""
    for allowed in ALLOWED:
        text = re.sub(allowed, lambda match: " " * len(match[0]), text, flags=re.IGNORECASE)
    return [text[max(0, m.start() - 30) : m.end() + 30].replace("\n", " ") for m in WORDS.finditer(text)]


def test_the_page_is_one_table_of_at_most_sixty_words() -> None:
    assert 40 <= len(terms()) <= MOST
    assert len({joined(word) for word in terms()}) == len(terms())


def test_each_word_is_set_apart_from_another_one() -> None:
    rows = re.findall(r"^\| .+ \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert all(row.count("|") == 4 for row in rows)


def test_options_are_spelled_as_in_the_page() -> None:
    page = {joined(word): word.lower() for word in terms()}
    for command, word in option_words():
        for part in parts(word):
            wanted = page.get(joined(part))
            spelled = part.lower().removesuffix("s")
            if wanted is not None:
                same = wanted.replace("-", " ").removesuffix("s")
                assert spelled == same, f"rlhfsim {command}: {word!r} says {part!r}, the page {wanted!r}"


@pytest.mark.parametrize("word", terms())
def test_each_word_of_the_page_is_used(word: str) -> None:
    pages = "\n".join(path.read_text() for path in DOCS.glob("*.md") if path.name != "glossary.md")
    form = re.escape(word).replace(r"\ ", r"[\s_-]+").replace(r"\-", r"[\s_-]*")
    assert re.search(rf"(?<![a-z]){form}", f"{help_text()}\n{pages}", re.IGNORECASE), f"nothing says {word!r}"


def test_no_help_text_says_a_banned_word() -> None:
    assert not banned(help_text())


@pytest.mark.parametrize("folder", ["rlhfsim", "executor"])
def test_no_message_and_no_key_says_a_banned_word(folder: str) -> None:
    met = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for line, text in strings(path):
            if (file, text) not in NAMES_KEPT:
                met += [f"{file}:{line}: {words}" for words in banned(text)]
    assert not met


@pytest.mark.parametrize("pattern", ["docs/**/*.md", "scenarios/**/*.yaml", "hardware_profiles/*.yaml"])
def test_no_page_and_no_scenario_says_a_banned_word(pattern: str) -> None:
    met = {
        path.relative_to(ROOT).as_posix(): words
        for path in sorted(ROOT.glob(pattern))
        if (words := banned(path.read_text()))
    }
    assert not met


@pytest.mark.parametrize(
    "text", ["the memory book", "two seats", "a placement frame", "world", "flips", "a_seat", "Frames"]
)
def test_a_banned_word_is_seen_however_it_is_written(text: str) -> None:
    assert banned(text)


@pytest.mark.parametrize(
    "text", ["framework", "DataFrame", "world_size", "cornered", "booked", "a world size"]
)
def test_words_that_only_look_like_it_pass(text: str) -> None:
    assert not banned(text)


def test_every_exception_is_still_needed() -> None:
    for file, text in NAMES_KEPT:
        assert text in {found for _, found in strings(ROOT / file)}, f"{file} no longer says {text!r}"


OF = re.compile(r'^[ \t]*"""Of ', re.MULTILINE)


def test_a_docstring_names_its_subject_first() -> None:
    files = (path for top in ("rlhfsim", "executor", "lab") for path in (ROOT / top).rglob("*.py"))
    assert not [str(path.relative_to(ROOT)) for path in files if OF.search(path.read_text())]


DIALECT = re.compile(
    r"\b(stands?(?!-in|-alone| (in )?for| still| out)|stood(?! in)|besides?|(is|are) known of|bec[ao]mes? of|door)\b",
    re.IGNORECASE,
)
"""Words of this house, for which readers of English expect others."""
CODE = re.compile(r"```.*?```|`[^`]*`|\{[^{}]*\}|\]\([^)]*\)", re.DOTALL)
"""What names things in a text: code and links of a page, names, and values of an f-string."""


def prose(path: Path) -> Iterator[str]:
    """What people read of a file: a page, or the comments and strings of more than a word of a module."""
    if path.suffix == ".md":
        yield path.read_text()
        return
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
                yield token.string


def test_texts_are_plain_technical_english() -> None:
    modules = (path for top in ("rlhfsim", "executor") for path in (ROOT / top).rglob("*.py"))
    pages = (path for path in (*DOCS.rglob("*.md"), ROOT / "README.md") if path.name != "glossary.md")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (*modules, *pages)
        for text in prose(path)
        for match in DIALECT.finditer(CODE.sub("", text))
    ]
    assert not found, "\n".join(found)
