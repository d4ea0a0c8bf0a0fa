"""Problems, files of problems, tiny models and their warm-up."""

from __future__ import annotations

import csv
import gzip
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.rewards.answers import is_right
from executor.settings import Data
from executor.tasks import formats, generators, hub, lengths, tiny
from executor.tasks.files import FileSource
from executor.tasks.prompts import Generated
from executor.tasks.sources import open_source
from executor.tasks.text import ByteText, Text
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.presets import resolve_model

TASKS = [
    ("arithmetic", 1),
    ("arithmetic", 3),
    ("comparison", 2),
    ("comparison", 4),
    ("logic", 1),
    ("logic", 3),
    ("logic", 6),
]


@pytest.mark.parametrize(("task", "difficulty"), TASKS)
def test_a_generated_problem_depends_on_seed_and_position_alone(task: Any, difficulty: int) -> None:
    source = Generated(task=task, difficulty=difficulty, seed=3)
    whole = source.batch(0, 20)
    assert source.batch(0, 20) == whole
    assert [source.batch(i, 1)[0] for i in range(20)] == whole
    assert Generated(task=task, difficulty=difficulty, seed=4).batch(0, 20) != whole


@pytest.mark.parametrize(("task", "difficulty"), TASKS)
def test_held_out_problems_are_never_trained_on(task: Any, difficulty: int) -> None:
    source = Generated(task=task, difficulty=difficulty)
    held_out = source.held_out(50)
    prompts = {problem.prompt for problem in held_out}
    assert len(prompts) == len(held_out) > 20
    assert source.held_out(50) == held_out
    assert prompts.isdisjoint(problem.prompt for problem in source.batch(0, 500))


@pytest.mark.parametrize("share", [1e-300, 0.001, 0.9999])
def test_next_to_no_generated_problem_on_one_side_is_refused(share: float) -> None:
    with pytest.raises(RlhfsimError, match=r"held_out: .* leaves next to none") as refused:
        open_source(Data(task="arithmetic", held_out=share), "grpo", 0)
    assert refused.value.code == "few-problems"


def test_a_task_without_problems_on_one_side_ends_in_an_error() -> None:
    with pytest.raises(RlhfsimError, match="all for training") as refused:
        Generated(task="arithmetic", difficulty=1, share=1e-12).held_out(1)
    assert refused.value.code == "task-too-small"


def test_a_held_out_sum_is_not_trained_on_with_its_summands_swapped() -> None:
    source = Generated(task="arithmetic")
    trained = {problem.prompt for problem in source.batch(0, 3000)}
    for problem in source.held_out(50):
        if "+" in problem.prompt:
            left, right = problem.prompt.rstrip("=").split("+")
            assert f"{right}+{left}=" not in trained


def test_arithmetic_answers_are_right() -> None:
    for problem in Generated(task="arithmetic", difficulty=3).batch(0, 200):
        assert re.fullmatch(r"\d{1,3}[+-]\d{1,3}=", problem.prompt)
        numbers = re.findall(r"\d+", problem.prompt)
        left, right = int(numbers[0]), int(numbers[1])
        assert int(problem.answer) == (left + right if "+" in problem.prompt else left - right)


def test_comparison_answers_are_right() -> None:
    for difficulty in (1, 2, 4):
        for problem in Generated(task="comparison", difficulty=difficulty).batch(0, 200):
            name, left, right = re.fullmatch(r"(max|min)\((\d+),(\d+)\)=", problem.prompt).groups()  # type: ignore[union-attr]
            assert len(left) == len(right) == difficulty
            assert int(left) != int(right)
            assert int(problem.answer) == {"max": max, "min": min}[name](int(left), int(right))


def test_a_held_out_comparison_is_not_trained_on_with_its_numbers_swapped() -> None:
    source = Generated(task="comparison", difficulty=2)
    trained = {problem.prompt for problem in source.batch(0, 5000)}
    held_out = source.held_out(200)
    assert len(held_out) == 200
    for problem in held_out:
        name, left, right = re.split(r"[(,]", problem.prompt.rstrip(")="))
        assert f"{name}({right},{left})=" not in trained


@pytest.mark.parametrize("difficulty", [1, 4, 9])
def test_orders_follow_from_their_statements(difficulty: int) -> None:
    checked = 0
    for problem in Generated(task="logic", difficulty=difficulty).batch(0, 30):
        if "?" not in problem.prompt:
            continue
        said, asked = problem.prompt.rstrip("=").split(";")
        assert said.count(",") == difficulty - 1
        above = {(s[0], s[2]) if s[1] == ">" else (s[2], s[0]) for s in said.split(",")}
        for _ in range(difficulty):
            above |= {(a, d) for a, b in above for c, d in above if b == c}
        first, second = asked.split("?")
        assert ((first, second) in above) == (problem.answer == ">")
        assert ((second, first) in above) == (problem.answer == "<")
        checked += 1
    assert checked > 5


def test_knights_have_exactly_one_solution() -> None:
    checked = 0
    for problem in Generated(task="logic", difficulty=3).batch(0, 40):
        if ":" not in problem.prompt:
            continue
        said, asked = problem.prompt.rstrip("=").split(";")
        assert asked == "abc"
        assert _worlds(said) == [problem.answer]
        checked += 1
    assert checked > 10


def _worlds(said: str) -> list[str]:
    """Solutions, by evaluating the text itself."""
    found = []
    for number in range(8):
        bits = f"{number:03b}"
        world = dict(zip("abc", (bit == "1" for bit in bits), strict=True))
        claims = [claim.split(":") for claim in said.split(",")]
        python = {p: c.replace("-", " not ").replace("+", " or ").replace("*", " and ") for p, c in claims}
        if all(eval(text, {}, world) == world[person] for person, text in python.items()):
            found.append(bits)
    return found


def test_a_claim_about_oneself_has_the_known_solutions() -> None:
    i_lie = generators._Claim(literals=((0, True), (0, True)), both=False)
    i_am_true = generators._Claim(literals=((0, False), (0, False)), both=True)
    assert generators.solutions([i_lie]) == []
    assert generators.solutions([i_am_true]) == [(0,), (1,)]


@pytest.mark.parametrize("task", ["arithmetic", "comparison", "logic"])
def test_preferences_have_a_right_and_a_wrong_side(task: Any) -> None:
    data = Data(task=task, difficulty=2)
    for problem in open_source(data, "dpo", 0).batch(0, 20):
        assert is_right(problem.meta["chosen"], problem.answer)
        assert not is_right(problem.meta["rejected"], problem.answer)
    labelled = open_source(data, "kto", 0).batch(0, 20)
    for problem in labelled:
        assert (problem.meta["label"] > 0) == is_right(problem.meta["response"], problem.answer)
    assert {problem.meta["label"] for problem in labelled} == {1.0, -1.0}
    assert "chosen" not in open_source(data, "grpo", 0).batch(0, 1)[0].meta


def _rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1, "level": i % 3} for i in range(count)]


def _jsonl(path: Path, rows: list[Any]) -> Data:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(task="file", path=str(path))


def _parquet(path: Path, rows: list[Any]) -> Data:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return Data(task="file", path=str(path))


def test_parquet_with_text_that_is_not_utf8_is_refused_with_its_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"\xff\xfe"] * 20, pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"prompt": texts, "answer": ["1"] * 20})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    data = Data(task="file", path=str(tmp_path / "d.parquet"))
    with pytest.raises(RlhfsimError, match="rows 1 to 20 is not UTF-8"):
        open_source(data, "grpo", 5)


@pytest.mark.parametrize(("write", "name"), [(_jsonl, "d.jsonl"), (_parquet, "d.parquet")])
def test_a_file_is_read_epoch_after_epoch(
    write: Callable[[Path, list[Any]], Data], name: str, tmp_path: Path
) -> None:
    source = open_source(write(tmp_path / name, _rows(20)), "grpo", 5)
    held_out = {problem.prompt for problem in source.held_out(100)}
    assert len(held_out) == 2
    epochs = [source.batch(18 * epoch, 18) for epoch in range(3)]
    sets = [{problem.prompt for problem in epoch} for epoch in epochs]
    assert sets[0] == sets[1] == sets[2]
    assert len(sets[0]) == 18
    assert held_out.isdisjoint(sets[0])
    assert epochs[0] != epochs[1] != epochs[2]
    problem = epochs[0][0]
    assert int(problem.answer) == int(problem.prompt.split("+")[0]) + 1
    assert set(problem.meta) == {"prompt", "answer", "level"}


def test_a_batch_at_an_epoch_border_is_whole_and_resumes_anywhere(tmp_path: Path) -> None:
    data = _jsonl(tmp_path / "d.jsonl", _rows(7))
    stream = open_source(data, "grpo", 0).batch(0, 100)
    for position, count in ((0, 7), (6, 3), (7, 7), (13, 30), (69, 31)):
        again = open_source(data, "grpo", 0)
        assert again.batch(position, count) == stream[position : position + count]


def test_order_is_kept_without_shuffling(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    _jsonl(path, _rows(5))
    source = open_source(Data(task="file", path=str(path), shuffle=False), "grpo", 0)
    assert [p.answer for p in source.batch(0, 6)] == ["1", "2", "3", "4", "5", "1"]


def test_preference_columns_are_read(tmp_path: Path) -> None:
    pairs = [{"prompt": "p", "chosen": "good", "rejected": "bad"}]
    [problem] = open_source(_jsonl(tmp_path / "p.jsonl", pairs), "dpo", 0).batch(0, 1)
    assert (problem.meta["chosen"], problem.meta["rejected"]) == ("good", "bad")
    labels = [{"prompt": "p", "answer": "r", "label": False}, {"prompt": "p", "answer": "s", "label": True}]
    found = open_source(_jsonl(tmp_path / "l.jsonl", labels), "kto", 0).batch(0, 2)
    assert {p.meta["response"]: p.meta["label"] for p in found} == {"r": -1.0, "s": 1.0}


@pytest.mark.parametrize(
    ("text", "code", "line", "words"),
    [
        ("", "data-empty", None, "no rows"),
        ("\n\n", "data-empty", None, "no rows"),
        ('{"prompt": "a", "answer": "b"}\n\n{"prompt": \n', "data-line", 3, "not a JSON object"),
        ('["a", "b"]\n', "data-line", 1, "a JSON list"),
        ('{"riddle": "a", "answer": "b"}\n', "data-column", None, "no column 'prompt'"),
        ('{"prompt": "a", "answer": "b"}\n\n{"prompt": "c"}\n', "data-value", 3, "'answer' has no value"),
        ('{"prompt": " ", "answer": "b"}\n', "data-value", 1, "an empty prompt"),
        ('{"prompt": "a", "answer": ["b"]}\n', "data-value", 1, "'answer' must be text"),
        ('{"prompt": "\\ud800 is half", "answer": "b"}\n', "data-encoding", 1, "holds \\ud800"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(
    text: str, code: str, line: int | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(RlhfsimError, match=re.escape(words)) as caught:
        open_source(Data(task="file", path=str(path)), "grpo", 0)
    assert caught.value.code == code
    assert caught.value.place is not None
    assert (caught.value.place.file, caught.value.place.line) == (str(path), line)


def test_missing_unknown_and_broken_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    (tmp_path / "data.txt").write_text("x")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\n")
    for path, code in (
        (tmp_path / "none.jsonl", "data-missing"),
        (tmp_path / "data.txt", "data-format"),
        (broken, "data-format"),
        (binary, "data-encoding"),
        (None, "data-missing"),
    ):
        with pytest.raises(RlhfsimError) as caught:
            open_source(Data(task="file", path=str(path) if path else None), "grpo", 0)
        assert caught.value.code == code


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_a_terabyte_without_a_line_is_refused_at_its_first_bytes(ending: str, tmp_path: Path) -> None:
    huge = tmp_path / f"huge{ending}"
    with huge.open("wb") as file:
        file.write(b"[" if ending == ".json" else b"")
        file.truncate(2**40)
    with pytest.raises(RlhfsimError) as caught:
        open_source(Data(task="file", path=str(huge)), "grpo", 0)
    assert caught.value.code == "data-format"
    assert "64 MiB" in caught.value.message or "2 GiB" in caught.value.message


def _saved(folder: Path, rows: list[Any]) -> Data:
    import datasets

    whole = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(1))}).save_to_disk(folder)
    return Data(path=str(folder))


def _csv(path: Path, rows: list[Any]) -> Data:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return Data(path=str(path))


def _shards(folder: Path, rows: list[Any]) -> Data:
    (folder / "data").mkdir(parents=True)
    for number, part in enumerate((rows[:1], rows[1:])):
        _jsonl(folder / "data" / f"train-{number}.jsonl", part)
    _jsonl(folder / "data" / "test-0.jsonl", [{"none": 1}])
    return Data(path=str(folder))


def _array(path: Path, rows: list[Any]) -> Data:
    path.write_text(json.dumps(rows))
    return Data(path=str(path))


def _packed(write: Callable[[Path, list[Any]], Data]) -> Callable[[Path, list[Any]], Data]:
    def pack(path: Path, rows: list[Any]) -> Data:
        plain = path.with_suffix("")
        write(plain, rows)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
        return Data(path=str(path))

    return pack


@pytest.mark.parametrize(
    ("write", "name"),
    [
        *((_saved, "saved"), (_csv, "d.csv"), (_shards, "folder"), (_array, "d.json"), (_parquet, "d.pq")),
        *((_packed(_jsonl), "d.jsonl.gz"), (_packed(_csv), "d.csv.gz")),
    ],
)
def test_data_are_read_as_people_have_them(
    write: Callable[[Path, list[Any]], Data], name: str, tmp_path: Path
) -> None:
    rows = [{"question": 'a "quoted",\nbroken line', "answer": "007"}, {"question": "b", "answer": "NA"}]
    heard: list[str] = []
    data = replace(write(tmp_path / name, rows), shuffle=False)
    source = open_source(data, "grpo", 0, say=heard.append)
    found = [(p.prompt, p.answer) for p in source.batch(0, 2)]
    assert found == [(row["question"], row["answer"]) for row in rows]
    assert heard == ["data: there is no column 'prompt', 'question' is used (data.prompt_column)"]


MESSY = (
    b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n\r\n{"prompt": "b", "answer": "x"}\n\xff bad\n[1]\n'
    b'{"prompt": null, "answer": "1"}\n{"prompt": "c", "answer": {"no": "text"}}\n{"prompt": "d", "ans\n'
    b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],'
    b' "answer": 2}\n{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": 2}\n'
    b'{"prompt": [{"role": "user", "content": null}], "answer": 2}\n{"prompt": "e", "answer": "1", "image": "x"}'
)


def test_a_messy_file_ends_the_run_at_its_line_or_is_read_without_its_bad_rows(tmp_path: Path) -> None:
    path, heard = tmp_path / "messy.jsonl", list[str]()
    path.write_bytes(MESSY)
    with pytest.raises(RlhfsimError, match="not UTF-8") as caught:
        open_source(Data(path=str(path)), "grpo", 0)
    assert caught.value.place is not None
    assert caught.value.place.line == 4
    data = Data(path=str(path), on_bad_row="drop", chat_template=True, shuffle=False)
    source = open_source(data, "grpo", 0, say=heard.append)
    assert [p.answer for p in source.batch(0, 3)] == ["1", "x", "2"]
    assert source.batch(2, 1)[0].prompt == ({"role": "user", "content": "hi"},)
    assert "8 of 11 rows are dropped" in heard[0]
    assert f"{path}:4" in heard[0]
    for number, words in ((9, "a part of type 'image_url'"), (11, "holds image, which no model here reads")):
        path.write_bytes(MESSY.splitlines()[number])
        with pytest.raises(RlhfsimError, match=words):
            open_source(Data(path=str(path), chat_template=True), "grpo", 0)


def test_conversations_hold_prompt_and_response(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]
    data = replace(_jsonl(tmp_path / "m.jsonl", [{"conversations": turns}]), chat_template=True)
    [problem] = open_source(data, "sft", 0).batch(0, 1)
    assert (problem.prompt, problem.meta["response"]) == (({"role": "user", "content": "q"},), "yes")
    bad = [turns[0], {"from": "gpt", "value": "no"}]
    data = replace(_parquet(tmp_path / "p.pq", [{"chosen": turns, "rejected": bad}]), chat_template=True)
    [problem] = open_source(data, "reward_model", 0).batch(0, 1)
    assert (problem.prompt, problem.meta["chosen"], problem.meta["rejected"]) == (
        ({"role": "user", "content": "q"},),
        "yes",
        "no",
    )
    nested = [{"prompt": turns[:1], "reward_model": {"style": "rule", "ground_truth": "4"}}]
    data = replace(_jsonl(tmp_path / "v.jsonl", nested), chat_template=True)
    assert open_source(data, "grpo", 0).batch(0, 1)[0].answer == "4"


def test_a_gzip_file_that_unpacks_to_far_more_than_text_is_refused_before_it_fills_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b'{"prompt": "a"}\n' + b" " * 40 * 2**20))
    monkeypatch.setattr(formats, "MAX_UNPACKED_BYTES", 2**20)
    with pytest.raises(RlhfsimError, match="over 100 times its size") as caught:
        open_source(Data(path=str(bomb)), "grpo", 0)
    assert caught.value.place is not None
    assert caught.value.place.file == str(bomb)


def test_a_packed_file_is_named_as_it_lies_there(tmp_path: Path) -> None:
    data = _packed(_jsonl)(tmp_path / "d.jsonl.gz", [{"prompt": "a", "answer": "1"}, {"prompt": None}])
    with pytest.raises(RlhfsimError, match="has no value") as caught:
        open_source(data, "grpo", 0)
    assert caught.value.place is not None
    assert (caught.value.place.file, caught.value.place.line) == (str(tmp_path / "d.jsonl.gz"), 2)
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress(b"prompt,answer\na,1\n")[:-9])
    with pytest.raises(RlhfsimError, match="cannot be read as gzip: ") as caught:
        open_source(Data(path=str(torn)), "grpo", 0)
    with pytest.raises(RlhfsimError, match="of no kind that is read"):
        open_source(replace(data, path=str(_packed(_array)(tmp_path / "d.bin.gz", []).path)), "grpo", 0)


HH = "\n\nHuman: Is 4 even?\n\nAssistant: Yes.\n\nHuman: And 5?\n\nAssistant:"


def test_whole_conversations_as_text_are_cut_into_prompt_and_answers(tmp_path: Path) -> None:
    """The form of hh-rlhf."""
    path = tmp_path / "hh.jsonl.gz"
    _packed(_jsonl)(path, [{"chosen": f"{HH} No.", "rejected": f"{HH} Yes,\n\nit is."}])
    [plain] = open_source(Data(path=str(path)), "dpo", 0).batch(0, 1)
    assert (plain.prompt, plain.meta["chosen"], plain.meta["rejected"]) == (HH, " No.", " Yes,\n\nit is.")
    [chat] = open_source(Data(path=str(path), chat_template=True), "reward_model", 0).batch(0, 1)
    said = [("user", "Is 4 even?"), ("assistant", "Yes."), ("user", "And 5?")]
    assert chat.prompt == tuple({"role": role, "content": text} for role, text in said)
    assert (chat.meta["chosen"], chat.meta["rejected"]) == ("No.", "Yes,\n\nit is.")


@pytest.mark.parametrize(
    ("rejected", "words"),
    [
        (HH.replace("5", "6") + " Yes.", "differ before their last turn"),
        ("\n\nHuman: Is 4 even?\n\nAssistant: Yes.\n\nHuman: And 5?", "does not end with a turn of"),
        ("No.", "does not end with a turn of"),
    ],
)
def test_a_pair_of_two_prompts_is_no_pair(rejected: str, words: str, tmp_path: Path) -> None:
    good = {"chosen": f"{HH} No.", "rejected": f"{HH} Yes."}
    data = _jsonl(tmp_path / "hh.jsonl", [good, {"chosen": f"{HH} No.", "rejected": rejected}])
    with pytest.raises(RlhfsimError, match=words) as caught:
        open_source(data, "dpo", 0)
    assert caught.value.place is not None
    assert caught.value.place.line == 2
    assert len(open_source(replace(data, on_bad_row="drop"), "dpo", 0).batch(0, 1)) == 1


@pytest.mark.parametrize(
    ("algorithm", "row", "words"),
    [
        (
            "grpo",
            {"text": "a", "id": 3, "tags": ["x"]},
            r"columns: text \(text\), id \(number\), tags \(list\)",
        ),
        ("sft", {"text": "a", "meta": {"k": 1}}, "no example of an answer"),
        ("dpo", {"chosen": "good", "rejected": "bad"}, "without one, both sides are conversations"),
    ],
)
def test_a_set_without_a_prompt_says_what_it_has_and_what_to_map(
    algorithm: str, row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RlhfsimError, match="no column 'prompt'") as caught:
        open_source(_jsonl(tmp_path / "d.jsonl", [row]), algorithm, 0)
    assert re.search(words, str(caught.value.help))
    assert "name the right one with data.prompt_column" in str(caught.value.help)


def test_a_name_on_the_hub_without_a_network_is_refused_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, ended = threading.Event(), threading.Event()

    def hangs(*_: Any, **__: Any) -> None:
        started.set()
        ended.wait(30)
        raise TimeoutError  # as a connection that is never answered

    monkeypatch.setattr("socket.create_connection", hangs)
    monkeypatch.setattr(hub, "CONNECT_S", 0.05)
    with pytest.raises(RlhfsimError, match="the hub cannot be reached") as caught:
        open_source(Data(path="nobody/no-such-data"), "grpo", 0)
    assert caught.value.code == "data-hub"
    assert started.is_set()
    ended.set()


def test_all_rows_are_held_out_only_where_nothing_is_trained(tmp_path: Path) -> None:
    data = Data(path=str(_jsonl(tmp_path / "d.jsonl", _rows(20)).path), held_out=1.0)
    with pytest.raises(RlhfsimError, match="leaves no row to train on"):
        open_source(data, "grpo", 0)
    assert len(open_source(data, "grpo", 0, training=False).held_out(50)) == 20


def test_a_question_in_two_columns_is_refused_unless_one_is_named(tmp_path: Path) -> None:
    row = {"instruction": "translate", "input": "ja", "output": "yes"}
    data = _jsonl(tmp_path / "d.jsonl", [row] * 3)
    with pytest.raises(RlhfsimError, match="two columns, 'instruction' and 'input'"):
        open_source(data, "sft", 0)
    named = open_source(replace(data, prompt_column="instruction"), "sft", 0)
    assert named.batch(0, 1)[0].prompt == "translate"


def test_an_answer_that_is_missing_or_empty_is_a_bad_row(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    rows = {"prompt": ["a", "b", "c"], "answer": [1.0, float("nan"), None]}
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    table = tmp_path / "d.csv"
    table.write_text("prompt,answer\na,1.0\nb,\nc, \n")
    for file, why in (
        (path, "2 column 'answer' has no value here"),
        (table, "2 column 'answer' is empty here"),
    ):
        said: list[str] = []
        source = FileSource(Data(path=str(file), on_bad_row="drop"), say=said.append)
        assert [(p.prompt, p.answer) for p in source.batch(0, 1)] == [("a", "1.0")]
        assert len(source) == 1
        assert why in said[0]


def test_the_held_out_share_is_settable(tmp_path: Path) -> None:
    data = _jsonl(tmp_path / "d.jsonl", _rows(20))
    for share, held in ((0.0, 0), (0.25, 5), (1.0, 20)):
        source = FileSource(replace(data, held_out=share))
        assert len(source.held_out(100)) == held
        assert source.shares() == f"{20 - held} rows to train on, {held} held out (data.held_out)"
    drawn = open_source(Data(held_out=0.5), "grpo", 0)
    held_out = {p.prompt for p in drawn.held_out(50)}
    assert held_out.isdisjoint(p.prompt for p in drawn.batch(0, 100))
    assert open_source(Data(held_out=0.0), "grpo", 0).held_out(5) == []


def test_responses_without_answers_need_no_answer_column(tmp_path: Path) -> None:
    data = _jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}])
    assert open_source(data, "ppo", 0, answers="unused").batch(0, 1)[0].answer == ""
    with pytest.raises(RlhfsimError, match="no column 'answer'"):
        open_source(data, "ppo", 0)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_planner_prices_a_tiny_model_without_its_weights(
    family: tiny.Family, tied: bool, tmp_path: Path
) -> None:
    folder = tiny.config(tmp_path, family=family, hidden=64, layers=2, tied=tied)
    model = resolve_model(str(folder))
    assert (model.hidden, model.num_layers, model.vocab) == (64, 2, 64)
    assert model.tied_embeddings == tied


def test_the_vocabulary_writes_all_generated_problems() -> None:
    for task, difficulty in TASKS:
        source = Generated(task=task, difficulty=difficulty)  # type: ignore[arg-type]
        for problem in source.batch(0, 50):
            assert set(problem.prompt + problem.answer) <= set(tiny.CHARACTERS)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_a_tiny_model_is_made_saved_and_loaded(family: tiny.Family, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, again = (tiny.build(tmp_path / name, family=family, hidden=32, layers=2, seed=1) for name in "ab")
    tokenizer = AutoTokenizer.from_pretrained(first)
    text = "a>b,b<c;\n1-2+3="
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) == len(text)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (first, again)]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert models[0].num_parameters() == resolve_model(str(first)).num_params
    assert models[0].generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.slow
@pytest.mark.parallel
def test_a_warm_up_leaves_room_to_climb(tmp_path: Path) -> None:
    import torch

    from lab.warm_up import greedy_accuracy, warm_up

    torch.set_num_threads(1)
    task = Generated(task="arithmetic")
    base = tiny.build(tmp_path / "base")
    losses = warm_up(base, tmp_path / "warm", task, steps=65)
    assert losses[0] > 3.5
    assert losses[-1] < 1.0
    problems = task.batch(10**6, 200)
    assert greedy_accuracy(base, problems) < 0.05
    assert 0.2 < greedy_accuracy(tmp_path / "warm", problems) < 0.7


def test_puzzles_that_differ_in_the_order_of_literals_fall_on_one_side_of_the_split() -> None:
    one = generators._Claim(literals=((1, True), (0, False)), both=True)
    other = generators._Claim(literals=((0, False), (1, True)), both=True)
    assert str(one) != str(other)
    assert str(one.ordered) == str(other.ordered)


TEMPLATE = "{% for turn in messages %}{{ turn.role[0] }}:{{ turn.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chatty")
    tiny.config(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_chat_template_shows_a_text_as_a_turn_of_the_user(chatty: Path) -> None:
    text = Text(chatty, chat=True)
    assert text.decode([text.encode("1+1=")])[0] == "u:1+1=;a:"
    assert text.decode([Text(chatty).encode("1+1=")])[0] == "1+1="


def test_an_answer_to_a_turn_stands_in_the_template_between_two_turns(chatty: Path) -> None:
    text, asked = Text(chatty, chat=True), {"role": "user", "content": "1+1="}
    turn = text.encode_response("2;")[:-1]  # `;` ends a turn in this template
    between = text.encode_observation("no", int(turn[-1]))
    talk = (asked, {"role": "assistant", "content": "2"}, {"role": "user", "content": "no"})
    assert [*text.encode((asked,)), *turn, *between] == text.encode(talk).tolist()
    unended = text.encode_observation((talk[2],), int(turn[0]))
    assert [*text.encode((asked,)), *turn[:1], *unended] == text.encode(talk).tolist()


def test_conversations_of_a_file_pass_through_the_template(chatty: Path, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "b"}, {"role": "user", "content": "1+1="}]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": turns, "answer": "2"}) + "\n")
    problem = open_source(Data(task="file", path=str(file), chat_template=True), "grpo", 0).batch(0, 1)[0]
    text = Text(chatty, chat=True)
    assert text.decode([text.encode(problem.prompt)])[0] == "s:b;u:1+1=;a:"


def test_conversations_without_a_template_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "x"}], "answer": "2"}))
    with pytest.raises(RlhfsimError, match=r"needs data\.chat_template") as caught:
        open_source(Data(task="file", path=str(file)), "grpo", 0)
    assert caught.value.place is not None
    assert caught.value.place.line == 1


def test_a_conversation_needs_roles_and_contents(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user"}], "answer": "2"}))
    with pytest.raises(RlhfsimError, match="turns of role and content"):
        open_source(Data(task="file", path=str(file), chat_template=True), "grpo", 0)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    tiny.config(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RlhfsimError, match="no template"):
        Text(tmp_path, chat=True)


def prompts_file(folder: Path, tokens: list[int]) -> Path:
    """A JSONL file of prompts of so many byte tokens, each a digit repeated."""
    path = folder / "prompts.jsonl"
    rows = [{"prompt": str(i % 10) * n, "answer": "1"} for i, n in enumerate(tokens)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_one_long_prompt_of_a_file_is_found_before_the_run_starts(tmp_path: Path) -> None:
    data = Data(task="file", path=str(prompts_file(tmp_path, [5] * 700 + [40] + [7] * 99)), shuffle=False)
    said: list[str] = []

    def fitted(positions: int | None = None, **changes: Any) -> tuple[lengths.PromptLengths, FileSource]:
        source = FileSource(replace(data, **changes))
        return lengths.fit(source, ByteText(), replace(data, **changes), positions, said.append), source

    found, source = fitted()
    assert (found.rows, found.longest, found.too_long) == (800, 40, 0)
    assert found.words("drop") == "data: 800 prompts, the longest that is used has 40 tokens"
    found, source = fitted(positions=20)
    assert (found.longest, found.too_long, found.limit) == (7, 1, 20)
    assert "1 of more than 20 tokens are dropped (data.on_long)" in found.words("drop")
    assert max(len(str(p.prompt)) for p in [*source.batch(0, 800), *source.held_out(800)]) == 7
    found, source = fitted(positions=20, max_prompt_tokens=6, on_long="truncate")
    assert (found.longest, found.too_long, found.limit) == (6, 100, 6)
    assert "cut at their beginning" in found.words("truncate")
    with pytest.raises(
        RlhfsimError, match=r"1 of 800 prompts have more than 20 tokens \(this one 40"
    ) as caught:
        fitted(positions=20, on_long="refuse")
    assert caught.value.place is not None
    assert caught.value.place.line == 701
    with pytest.raises(RlhfsimError, match=r"800 of 800 prompts have more than 4 tokens"):
        fitted(max_prompt_tokens=4)


def test_lengths_of_a_large_file_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lengths, "KEPT", 100)
    data = Data(task="file", path=str(prompts_file(tmp_path, [3, 9] * 100)))
    first = lengths.fit(FileSource(data), ByteText(), data, None, print)
    monkeypatch.setattr(ByteText, "lengths", lambda *_: pytest.fail("counted again"))
    assert lengths.fit(FileSource(data), ByteText(), data, None, print) == first
    [kept] = (tmp_path / "cache" / "rlhfsim" / "prompt_lengths").iterdir()
    kept.write_bytes(b"broken")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lengths, "KEPT", 100)
    assert lengths.fit(FileSource(data), ByteText(), data, None, print) == first
