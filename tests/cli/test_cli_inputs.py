from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rlhfsim.cli.estimate import estimate
from rlhfsim.cli.gpus import gpus
from rlhfsim.cli.inputs import build_cluster, build_workload, input_options, lengths
from rlhfsim.cli.main import COMMANDS, cli
from rlhfsim.cli.memory import memory
from rlhfsim.cli.models import models
from rlhfsim.cli.params import Number, Whole
from rlhfsim.cli.simulate import Duration, Interval, Straggler
from rlhfsim.errors import RlhfsimError

GOLDEN = Path(__file__).parents[1] / "golden"


def given(*arguments: str) -> dict[str, Any]:
    """What the shared options make of a command line."""
    found: dict[str, Any] = {}

    @click.command()
    @input_options
    def probe(**values: Any) -> None:
        found.update(values)

    CliRunner().invoke(probe, ["--gpus", "8", "--model", "8b", *arguments], catch_exceptions=False)
    return found


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gpus", "0"), "--gpus"),
        (("--gpus", "-8"), "--gpus"),
        (("--gpus", "nan"), "--gpus"),
        (("--gpus", "1e9"), "--gpus"),
        (("--gpus", "9999999"), "--gpus"),
        (("--gpus", "8.5"), "--gpus"),
        (("--gpus", ""), "--gpus"),
        (("--gpus", "9" * 400), "--gpus"),
        (("--gpus-per-node", "0"), "--gpus-per-node"),
        (("--oversubscription", "0.5"), "--oversubscription"),
        (("--oversubscription", "inf"), "--oversubscription"),
        (("--price", "-1"), "--price"),
        (("--price", "nan"), "--price"),
        (("--price", "3 GB"), "--price"),
        (("--prompts", "0"), "--prompts"),
        (("--prompts", "99999999999"), "--prompts"),
        (("--samples", "x"), "--samples"),
        (("--epochs", "0"), "--epochs"),
        (("--mini-batches", "-1"), "--mini-batches"),
        (("--seed", "-1"), "--seed"),
        (("--algorithm", "dop"), "dop"),
    ],
)
def test_a_bad_number_or_name_is_one_error_on_the_command_line(
    arguments: tuple[str, ...], named: str
) -> None:
    with pytest.raises(RlhfsimError) as caught:
        given(*arguments)
    assert named in caught.value.message
    assert caught.value.place is not None
    assert caught.value.place.file == "command line"
    assert caught.value.help


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--gpu", "h1000"), "unknown-hardware-profile"),
        (("--gpu", "no/such.yaml"), "unreadable-file"),
        (("--rollout-gpu", "h20"), "missing-value"),
    ],
)
def test_a_cluster_that_cannot_be_built_says_why(arguments: tuple[str, ...], code: str) -> None:
    with pytest.raises(RlhfsimError) as caught:
        build_cluster(given(*arguments))
    assert caught.value.code == code
    assert caught.value.place is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama-9000b"), "unknown model"),
        (("--critic", "foo-1b"), "unknown model"),
        (("--reward", "none"), "leaves no reward"),
        (("--algorithm", "distillation"), "has no teacher"),
        (("--rules", "seconds=1"), "--rules"),
        (("--rules", "workers=0"), "--rules"),
        (("--rules", "workers"), "name=value"),
        (("--prompts", "7", "--mini-batches", "2"), "do not split"),
        (("--prompts", "1000000", "--samples", "1000000"), "out of range"),
        (("--prompt-len", "many"), "not a number of tokens"),
        (("--prompt-len", "0"), "--prompt-len"),
        (("--prompt-len", "-5"), "--prompt-len"),
        (("--prompt-len", "nan"), "--prompt-len"),
        (("--prompt-len", "1e300"), "--prompt-len"),
        (("--response-len", "normal:mean=3"), "unknown length distribution"),
        (("--response-len", "lognormal:mean=2000"), "'max' is missing"),
        (("--response-len", "lognormal:mean=2000,max=8k,sigma=-1"), "sigma"),
        (("--response-len", "lognormal:mean=2000,max=8k,sgima=1"), "sgima"),
        (("--response-len", "lognormal:mean=2000,mean=1,max=8k"), "is given twice"),
        (("--response-len", "truncated:mean=10,std=2,min=90,max=20"), "range is empty"),
        (("--response-len", "empirical:file=/no/such/file"), "cannot read"),
    ],
)
def test_a_workload_that_makes_no_sense_says_why(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(RlhfsimError) as caught:
        build_workload(given(*arguments))
    assert words in caught.value.message
    assert caught.value.place is not None


@pytest.mark.parametrize(
    ("option", "bad"),
    [("--response-len", "lognormal:9"), ("--rules", "5"), ("--environment", "4"), ("--speculation", "x")],
)
def test_the_remedy_of_an_option_of_pairs_can_be_typed(option: str, bad: str) -> None:
    with pytest.raises(RlhfsimError) as caught:
        build_workload(given(option, bad))
    help_text = caught.value.help
    assert help_text is not None
    words = help_text.removeprefix("write ").split()
    assert words[0] == option
    build_workload(given(*words))


def test_the_price_reaches_the_cluster() -> None:
    cluster = build_cluster(given("--price", "2.5 USD/h"))
    assert cluster.node_group.profile.price is not None
    assert cluster.node_group.profile.price.value == 2.5


def test_a_second_pool_has_its_own_gpu() -> None:
    cluster = build_cluster(given("--rollout-gpu", "h20", "--rollout-gpus", "16"))
    assert [(p.profile.name, p.gpus) for p in cluster.node_groups] == [("h100_sxm", 8), ("h20_sxm", 16)]


def test_lengths_accept_numbers_thousands_and_distributions(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("10\n20\n30\n")
    assert lengths("8k", "--x") == {"kind": "fixed", "value": 8192.0}
    assert lengths("lognormal:mean=2k,sigma=0.5,max=8k", "--x")["mean"] == 2048.0
    assert lengths("truncated:mean=500,std=200,max=2048", "--x")["std"] == 200.0
    workload = build_workload(given("--response-len", f"empirical:file={file}"))
    assert workload.response_len.maximum == 30.0


def test_rules_replace_the_default_reward_model_and_join_a_named_one() -> None:
    assert build_workload(given("--rules", "workers=8")).reward.model is None
    both = build_workload(given("--rules", "workers=8", "--reward", "1b")).reward
    assert both.model == "1b"
    assert both.rules is not None
    assert both.rules.workers == 8


def test_switches_of_the_workload_take_effect() -> None:
    workload = build_workload(given("--no-kl", "--no-packing", "--epochs", "2", "--seed", "7"))
    assert (workload.kl, workload.packing, workload.epochs, workload.seed) == (False, False, 2, 7)


NUMBERS = (Whole, Number, Straggler, Interval, Duration)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_takes_a_number_that_is_not_finite(name: str) -> None:
    whole = cli.get_command(click.Context(cli), name)
    assert whole is not None
    every = whole.commands.values() if isinstance(whole, click.Group) else (whole,)
    for param in (param for command in every for param in command.params if isinstance(param.type, NUMBERS)):
        for text in ("nan", "inf", "-inf", "infinity", "1e999", "1" * 10**6):
            with pytest.raises(RlhfsimError):
                param.type.convert(
                    f"{text}:{text}" if isinstance(param.type, Straggler) else text, param, None
                )


def option_list(command: click.Command) -> str:
    lines = []
    for param in command.params:
        text = " ".join(param.opts)
        default = param.default if isinstance(param.default, str | int | float) else None
        shown = "" if default is None or default is False or default == "" else f" [{default}]"
        lines.append(f"{text}{shown}")
    return "\n".join(sorted(lines)) + "\n"


@pytest.mark.parametrize("command", [estimate, memory, gpus, models], ids=lambda c: str(c.name))
def test_options_and_defaults_are_those_of_the_golden_file(command: click.Command) -> None:
    """A new option is a decision: write the list that the assertion shows into the file."""
    assert option_list(command) == (GOLDEN / f"options_{command.name}.txt").read_text()


@pytest.mark.parametrize("command", [estimate, memory, gpus, models], ids=lambda c: str(c.name))
def test_every_option_is_explained_and_every_command_has_examples(command: click.Command) -> None:
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, param.opts
    assert command.epilog is not None
    assert "Examples:" in command.epilog
