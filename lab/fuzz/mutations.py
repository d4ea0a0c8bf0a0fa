"""A valid text and a generator of random choices to a text that is wrong in one to three places.

Documents are changed as trees, tables as cells, everything else as lines and bytes.
"""

from __future__ import annotations

import csv
import io
import json
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

DEEP = 100_000
LONG = "n" * 300


class Raw:
    """Text that stands in the document as it is: what no tree of Python can say."""

    def __init__(self, text: str) -> None:
        """`text` is not quoted."""
        self.text = text


class Pairs:
    """A mapping whose keys may are given twice."""

    def __init__(self, items: list[tuple[str, Any]]) -> None:
        """Key and value, in order."""
        self.items = items


NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, -5.5, 0.5, 5e-324, 1e-300, 1e30, 1e300, -1e300, 2**31, 2**63, -(2**63), 10**25),
    *(float("nan"), float("inf"), float("-inf"), True, False, Raw("1" + "0" * 400), Raw("1e400"), 10_000_000),
    Raw("9" * 5000),
)
WORDS: tuple[Any, ...] = (
    *(
        "",
        " ",
        "x",
        "same",
        "none",
        "true",
        "nan",
        "inf",
        "-1",
        "0",
        "1e300",
        "7e999",
        "3350",
        "-5 s",
        "-3 USD",
    ),
    *(
        "80 GB",
        "1 XB",
        "1e30 USD/h",
        "٣٤",
        "３",
        "²",
        LONG,
        "\ud800",
        "\x1b[31mred\x1b[0m",
        "a\nb",
        "\x00",
        "9" * 5000,
        "1.2.3",
    ),
    *(
        "<script>alert(1)</script>",
        "[bold]x[/bold]",
        "=1+1",
        "@SUM(A1)",
        "../../etc/passwd",
        "/dev/zero",
        ".",
    ),
    *(
        "2026-01-01",
        "4x",
        "h100",
        "70b",
        "${HOME}",
        "%s",
        "{}",
        "a.b.c",
        "*",
        "1,2,3",
        "1 2 3",
        "0x10",
        "1_0",
    ),
)
TREES: tuple[Any, ...] = (
    *(
        None,
        None,
        [],
        {},
        [[]],
        [None],
        ["x"],
        [0],
        {"": 0},
        {"a": None},
        {"kind": "fixed"},
        {"x": {"y": 1}},
        [1, 2, 3],
        ["a", "b"],
        [[1], [2, 3]],
    ),
    *(Raw("[" * DEEP), Raw("[" * 5000 + "]" * 5000), Raw('{"a":' * 3000 + "1" + "}" * 3000)),
)


def strange(rng: Random) -> Any:
    """A value that most places do not want."""
    return rng.choice(rng.choice((NUMBERS, NUMBERS, WORDS, TREES)))


# --- documents ------------------------------------------------------------------------------------


def document(text: str, rng: Random, *, json_only: bool) -> str:
    """A YAML or JSON document changed as a tree; written as JSON, which is YAML too."""
    tree = json.loads(text) if json_only else yaml.load(text, Loader=yaml.CSafeLoader)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = changed(tree, rng)
    if json_only or not isinstance(tree, dict) or not all(str(key).isidentifier() for key in tree):
        return written(tree, json_only=json_only)
    return "".join(f"{key}: {written(value, json_only=False)}\n" for key, value in tree.items())


def written(value: Any, *, json_only: bool) -> str:
    """A tree as JSON; special numbers as the format spells them."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict | Pairs):
        items = value.items if isinstance(value, Pairs) else list(value.items())
        return (
            "{"
            + ", ".join(f"{json.dumps(str(k))}: {written(v, json_only=json_only)}" for k, v in items)
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(item, json_only=json_only) for item in value) + "]"
    text = json.dumps(value, default=str)
    return text if json_only else {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)


def changed(tree: Any, rng: Random) -> Any:
    """The tree with one change at a place that is found by descending at random."""
    inner = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    if inner and rng.random() < 0.85:
        key = rng.choice(inner)
        copy = dict(tree) if isinstance(tree, dict) else list(tree)
        copy[key] = changed(copy[key], rng)
        return copy
    return rng.choice(_CHANGES)(tree, rng)


def _replace(tree: Any, rng: Random) -> Any:
    return strange(rng)


def _near(tree: Any, rng: Random) -> Any:
    """Another value of the same kind, which passes the check of form."""
    if isinstance(tree, bool):
        return rng.choice((not tree, int(tree), str(tree), "yess"))
    if isinstance(tree, int | float):
        scaled = [-tree, tree * 1e6, tree * 1e-9, tree + 0.5, tree + 1, tree - 1, 0, bool(tree), str(tree)]
        return rng.choice([*scaled, f"{tree} s", [tree]])
    if isinstance(tree, str):
        return rng.choice([tree.upper(), tree + "x", tree[:-1], f" {tree} ", tree * 40, [tree], {tree: tree}])
    return tree


def _shape(tree: Any, rng: Random) -> Any:
    if isinstance(tree, dict) and tree:
        key, other = rng.choice(list(tree)), rng.choice(list(tree))
        rest = {k: v for k, v in tree.items() if k != key}
        return rng.choice(
            (
                rest,
                {**rest, f"{key}x": tree[key]},
                {**tree, key: tree[other], other: tree[key]},
                {**tree, LONG: 1},
                {**tree, "\x1b[31m": 1},
                Pairs([*tree.items(), (str(key), strange(rng))]),
                list(tree.items()),
                list(tree.values()),
            )
        )
    if isinstance(tree, list) and tree:
        at = rng.randrange(len(tree))
        return rng.choice(
            (
                tree[:at],
                tree[at:],
                [*tree, *tree],
                [*tree, strange(rng)],
                tree[::-1],
                dict(enumerate(tree)),
                tree * 50 if len(tree) < 50 else tree,
            )
        )
    return rng.choice(([tree], {"value": tree}, [tree, tree], strange(rng)))


_CHANGES: tuple[Callable[[Any, Random], Any], ...] = (_replace, _replace, _near, _near, _shape)


# --- tables and lines -----------------------------------------------------------------------------


def table(text: str, rng: Random) -> str:
    """A CSV with cells, rows or columns that are wrong."""
    rows = [list(row) for row in csv.reader(io.StringIO(text))]
    for _ in range(rng.choice((1, 1, 2))):
        row = rng.choice(rows)
        column = rng.randrange(len(row)) if row else 0
        match rng.randrange(7):
            case 0:
                rows.remove(row) if len(rows) > 1 else row.clear()
            case 1:
                rows.append(list(row))
            case 2:
                row[:] = row[:column]
            case 3:
                row.append(_cell(rng))
            case _ if row:
                row[column] = _cell(rng)
    out = io.StringIO()
    csv.writer(out, delimiter=rng.choice(",,,,,,;\t")).writerows(rows)
    return out.getvalue()


def _cell(rng: Random) -> str:
    value = strange(rng)
    return value.text[:5000] if isinstance(value, Raw) else str(value)


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def lines(text: str, rng: Random) -> str:
    """A text with numbers, words or lines that are wrong."""
    parts = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(parts))
        match rng.randrange(9):
            case 0:
                del parts[at]
            case 1:
                parts.insert(at, parts[rng.randrange(len(parts))])
            case 2:
                parts[at] = parts[at][: rng.randrange(len(parts[at]) + 1)]
            case 3:
                parts[at] += _cell(rng)
            case 4:
                parts[at] = parts[at].replace("=", " ").replace(":", "")
            case 5:
                parts[at] = re.sub(r"\S+", lambda _: _cell(rng), parts[at], count=1)
            case _:
                parts = _with_number(parts, rng)
        parts = parts or [""]
    return "\n".join(parts)


def _with_number(parts: list[str], rng: Random) -> list[str]:
    having = [i for i, line in enumerate(parts) if _NUMBER.search(line)]
    if not having:
        return parts
    at = rng.choice(having)
    where = rng.choice(list(_NUMBER.finditer(parts[at])))
    parts[at] = parts[at][: where.start()] + _cell(rng) + parts[at][where.end() :]
    return parts


# --- bytes ----------------------------------------------------------------------------------------


def raw(content: bytes, rng: Random) -> bytes:
    """Bytes that are cut, spoiled, repeated, or of another encoding."""
    at = rng.randrange(len(content) + 1)
    text = content.decode("utf-8", "replace")
    return rng.choice(
        (
            lambda: b"",
            lambda: b"\x00",
            lambda: b"\n\n\n",
            lambda: b"null",
            lambda: b"[" * DEEP,
            lambda: b"{a: " * 2000,
            lambda: content[:at],
            lambda: content[at:],
            lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            lambda: (
                content[:at]
                + rng.choice((b"\x00", b"\xff\xfe", b"\t", b"\xed\xa0\x80", b"&a *a", b"\xc2\x85"))
                + content[at:]
            ),
            lambda: content + content,
            lambda: b"\xef\xbb\xbf" + content,
            lambda: text.encode("utf-16"),
            lambda: text.replace("\n", "\r").encode(),
            lambda: text.replace("\n", " ").encode(),
            lambda: text.translate({ord("0") + i: 0x660 + i for i in range(10)}).encode(),
        )
    )()


def events(content: bytes, rng: Random) -> bytes:
    """An event file of TensorBoard whose records are whole, in one of which a few bytes are wrong."""
    records, at = list[bytes](), 0
    while at < len(content):
        end = at + 16 + struct.unpack_from("<Q", content, at)[0]
        records.append(content[at:end])
        at = end
    number = rng.randrange(len(records))
    body = bytearray(records[number][12:-4])
    for _ in range(rng.choice((1, 1, 2, 8)) if body else 0):
        body[rng.randrange(len(body))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    records[number] = records[number][:12] + bytes(body) + records[number][-4:]
    if rng.random() < 0.3:
        rng.shuffle(records)
    return b"".join(records)


def spoiled(content: bytes, kind: str, rng: Random) -> bytes:
    """Another content of a file of this kind: json, yaml, csv, lines, events or bytes."""
    if kind == "events" and rng.random() < 0.7:
        return events(content, rng)
    if kind in ("bytes", "events") or rng.random() < 0.08:
        return raw(content, rng)
    text = content.decode()
    if kind == "jsonl":
        rows = text.splitlines()
        at = rng.randrange(len(rows))
        rows[at] = document(rows[at], rng, json_only=True)
        text = "\n".join(rows) + "\n"
    elif kind in ("json", "yaml"):
        text = document(text, rng, json_only=kind == "json")
    else:
        text = table(text, rng) if kind == "csv" else lines(text, rng)
    return text.encode("utf-8", "surrogatepass")
