"""The rows of a framework's keys as its file has them: `keys.yaml`, title -> rows, and `given_keys.yaml`.

    - {field: rollout.pp, key: --sglang-pp-size, default: 1, codec: !whole [1]}   a `Key`
    - {key: --prompt-data, value: "${PROMPTS}"}                                   a `FixedKey`
    - given: "!shared"                                                            as `given_that` has it
      rows: [...]
    - !the prefill                                                a row, rows or a rule that a module makes

A tag before a value says what is made of it: `!whole [1]` is `whole(1)`, `!call actor.train` is
`of_call("actor.train")`, `!the prefill` is what the module that reads the file calls so. A codec without
arguments is a word: `limit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import resources
from typing import Any

import yaml

from rlhfsim.interchange.dispatching import ENGINE_WORD, in_sglang, in_vllm, named
from rlhfsim.interchange.export import longest_prompt, longest_response
from rlhfsim.interchange.fields import PlanFields
from rlhfsim.interchange.given_data import samples_at_once
from rlhfsim.interchange.megatron_core import hosted_adam
from rlhfsim.interchange.predictions import memory, predicted
from rlhfsim.interchange.table import (
    ABOVE_ZERO,
    FROM_ROLLOUT,
    FixedKey,
    Key,
    Row,
    choice,
    clip_range,
    count,
    drafting,
    drafts,
    flag,
    given_that,
    holds,
    kept,
    lag,
    like,
    limit,
    marked,
    number,
    of_call,
    of_held,
    unwritten,
    whole,
)
from rlhfsim.plan import Plan


def of_plan(name: str) -> Callable[[Plan], Any]:
    """A field of a plan, as the value of a key that no row reads it from."""
    return lambda plan: PlanFields(plan, {})[name]


def whether(when: str) -> Callable[[Plan], bool]:
    """Whether conditions hold of a plan (`holds`), as the value of a key."""
    return lambda plan: holds(when, PlanFields(plan, {}))


TAGS: Mapping[str, Callable[..., Any]] = {
    "call": of_call,
    "choice": choice,
    "clip": clip_range,
    "count": count,
    "drafts": drafts,
    "flag": flag,
    "held": of_held,
    "hosted_adam": hosted_adam,
    "in_sglang": in_sglang,
    "in_vllm": in_vllm,
    "lag": lag,
    "like": like,
    "limit": limit,
    "marked": marked,
    "named": named,
    "number": number,
    "plan": of_plan,
    "said": partial(flag, both=True),
    "unwritten": unwritten,
    "whether": whether,
    "whole": whole,
}
"""Tag -> what makes a value of what follows it: nothing, one argument, or a list of them."""
SHARED: Mapping[str, Any] = {
    "ABOVE_ZERO": ABOVE_ZERO,
    "ENGINE_WORD": ENGINE_WORD,
    "FROM_ROLLOUT": FROM_ROLLOUT,
    "drafting": drafting,
    "kept": kept,
    "longest_prompt": longest_prompt,
    "longest_response": longest_response,
    "memory": memory,
    "predicted": predicted,
    "samples_at_once": samples_at_once,
}
"""What every file may name by `!the`."""


def rows_of(framework: str, own: Mapping[str, Any], file: str = "keys") -> dict[str, tuple[Row, ...]]:
    """Sections of a `Table` out of a file of a framework; `own`: what it names by `!the`, or as tags."""
    return {title: tuple(_rows(given)) for title, given in tagged(framework, file, own).items()}


def tagged(framework: str, file: str, own: Mapping[str, Any]) -> Any:
    """What a file of a framework says; `own`: as for `rows_of`."""
    known = {**TAGS, **SHARED, **own}

    class Loader(yaml.CSafeLoader):
        """The safe loader, with the tags."""

    def made(loader: yaml.CSafeLoader, tag: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return known[tag](*loader.construct_sequence(node, deep=True))
        if isinstance(node, yaml.MappingNode):
            return known[tag](loader.construct_mapping(node, deep=True))
        return known[node.value] if tag == "the" else known[tag](*([node.value] if node.value else []))

    Loader.add_multi_constructor("!", made)
    text = (resources.files("rlhfsim.interchange") / framework.replace("-", "_") / f"{file}.yaml").read_text()
    return yaml.load(text, Loader=Loader)


def _rows(given: Any) -> Iterator[Any]:
    """The rows of a list; what is made in Python may be several."""
    for row in given if isinstance(given, list | tuple) else (given,):
        if isinstance(row, tuple):
            yield from row
        elif not isinstance(row, dict):
            yield row
        elif "given" in row:
            yield from given_that(row["given"], *_rows(row["rows"]))
        else:
            yield _key(row) if "field" in row else FixedKey(**row)


def _key(given: dict[str, Any]) -> Key:
    """A row with its codec, which a word alone names where it takes no argument."""
    codec = given.get("codec", "whole")
    made = TAGS[codec]() if isinstance(codec, str) else codec
    return Key(**given | {"codec": made, "also": tuple(given.get("also", ()))})
