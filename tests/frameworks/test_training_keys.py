"""What decides training is written or demanded by every export, and listed in the page of its framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.training_tables import training_table
from rlhfsim.interchange.configuration.keys import key_table
from rlhfsim.interchange.export import export, exporters
from rlhfsim.interchange.table import bare
from rlhfsim.interchange.training_keys import training_keys
from tests.what_if.test_doctor_of_exports import plans

DOCS = Path(__file__).parents[2] / "docs/frameworks"
DECIDES = {
    "learning rate",
    "schedule",
    "steps or epochs",
    "data set",
    "its keys",
    "chat template",
    "reward function",
    "logger",
    "save interval",
    "evaluation interval",
    "seed",
}


@pytest.mark.parametrize("name", exporters())
def test_everything_that_decides_is_listed_under_a_key_that_the_release_has(name: str) -> None:
    rows, table = training_keys(name), key_table(name)
    assert {row.decides for row in rows} >= DECIDES
    here = len(table.releases) - 1
    assert [row.key for row in rows if row.key and table.at(bare(row.key), here) is None] == []
    assert next(row for row in rows if row.decides == "learning rate").demanded


@pytest.mark.parametrize("name", exporters())
def test_an_export_writes_each_of_them_and_ends_at_once_without_what_it_demands(name: str) -> None:
    plan = next(plans(name, 1))
    exported = export(plan, name, frozenset())
    text, launch = "\n".join(exported.files.values()), exported.files["launch.sh"]
    critic = plan.placement.role("critic") is not None
    for row in training_keys(name):
        if not row.key or row.when:
            continue
        assert row.key.rpartition(".")[2] in text, row.key
        if row.demanded:
            variable = str(row.value).strip("${}")
            assert f': "${{{variable}:?' in launch
            assert launch.count(f"${{{variable}}}") >= 1
    assert ("CRITIC_LR" in launch) == critic or name in ("trl", "slime")


@pytest.mark.parametrize("name", exporters())
def test_the_table_of_a_page_is_that_of_the_code(name: str) -> None:
    assert "\n".join(training_table(name)) in (DOCS / f"{name}.md").read_text(), (
        "python -m lab.training_tables"
    )


def test_a_default_ten_times_from_the_examples_is_named() -> None:
    rate = next(row for row in training_keys("areal") if row.decides == "learning rate")
    assert rate.far
    assert rate.own == "0.001; 1.7e-05 in its examples, 10 times or more apart"
    assert not any(row.far for row in training_keys("openrlhf"))
