"""Configurations that a job printed into its own log, as Python, Ray and terminals leave them."""

from __future__ import annotations

from typing import Any

from rlhfsim.interchange.logs.printed import printed_command, printed_values

PPRINT = """\
{'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,
                                 'optim': {'lr': 1e-06, 'betas': [0.9, 0.999]},
                                 'ppo_mini_batch_size': 64,
                                 'strategy': 'fsdp'},
                       'model': {'path': '/models/Qwen2.5-7B-Instruct'},
                       'rollout': {'enforce_eager': True,
                                   'n': 5,
                                   'prompt': ('a long text that pprint '
                                              'breaks'),
                                   'top_p': 1}},
 'data': {'max_response_length': 1024, 'train_batch_size': 256},
 'trainer': {'logger': ['console', 'wandb'],
             'n_gpus_per_node': 8,
             'nnodes': 1,
             'resume_path': None}}
"""


def whole(values: Any) -> None:
    assert values["actor_rollout_ref"]["rollout"] == {
        "enforce_eager": True,
        "n": 5,
        "prompt": "a long text that pprint breaks",
        "top_p": 1,
    }
    assert values["actor_rollout_ref"]["actor"]["optim"] == {"lr": 1e-6, "betas": [0.9, 0.999]}
    assert values["trainer"] == {
        "logger": ["console", "wandb"],
        "n_gpus_per_node": 8,
        "nnodes": 1,
        "resume_path": None,
    }


def test_a_printed_dict_is_read_with_rays_prefixes_colours_and_lines_of_others_between() -> None:
    text = ""
    for i, line in enumerate(PPRINT.splitlines()):
        text += f"\x1b[2m\x1b[36m(main_task pid=7)\x1b[0m {line}" + ("" if i == 13 else "\n")
        if i in (4, 13):
            text += "\x1b[36m(WorkerDict pid=9)\x1b[0m   warnings.warn(\n"
            text += "\x1b[36m(WorkerDict pid=9)\x1b[0m {'not': 'ours'}\n"
    (values,) = printed_values("starting {'a': 1}\n" + text + "step:1 - timing_s/gen:1.0\n")
    whole(values)


def test_without_ray_a_warning_in_between_is_passed_over() -> None:
    lines = PPRINT.splitlines()
    lines[6:6] = ["/lib/torch/x.py:3: FutureWarning: it's deprecated", "  import pynvml  # type: ignore"]
    (values,) = printed_values("Final config:\n" + "\n".join(lines))
    whole(values)


def test_a_dict_that_a_terminal_wrapped_and_cut_is_read() -> None:
    wrapped = PPRINT.replace("'/models/Qwen2.5-7B-Instruct'", "'/models/Qwen2.5-\n7B-Instruct'")
    wrapped = wrapped.replace("'fsdp'", "'fsdp'+312")
    (values,) = printed_values(wrapped)
    assert values["actor_rollout_ref"]["model"]["path"] == "/models/Qwen2.5-7B-Instruct"
    assert values["actor_rollout_ref"]["actor"]["strategy"] == "fsdp"
    (values,) = printed_values(PPRINT[: PPRINT.index("'nnodes'")])
    assert values["trainer"]["n_gpus_per_node"] == 8


def test_calls_of_argparse_and_dataclasses_are_read() -> None:
    items = {f"a{i}": i for i in range(12)}
    shown = ", ".join(f"{k}={v}" for k, v in items.items())
    (values,) = printed_values(f"Namespace({shown}, pretrain='meta/x', adam_betas=(0.9, 0.95), flag=True)")
    assert values == {**items, "pretrain": "meta/x", "adam_betas": [0.9, 0.95], "flag": True}
    lines = "\n".join(f"{k}={v}," for k, v in items.items())
    (values,) = printed_values(
        f"INFO - Training parameters GRPOConfig(\n{lines}\nhub=<HUB_TOKEN>,\nstrategy=<S.NO: 'no'>,\n"
        "accelerator=AcceleratorConfig(split=False, other=None),\nbf16=True,\n)"
    )
    assert (values["a3"], values["bf16"], values["accelerator"]) == (3, True, {"split": False, "other": None})


def test_metrics_and_small_dicts_are_no_configuration() -> None:
    metrics = ", ".join(f"'timing/x{i}': {i}.5" for i in range(30))
    assert printed_values(f"Global step 3: {{{metrics}}}\nray init kwargs: {{'num_cpus': None}}") == []


def test_an_echoed_command_is_read_with_its_variables() -> None:
    arguments = " \\\n ".join(f"data.k{i}={i}" for i in range(8))
    text = f"```\nMODEL=org/m\nbatch: 3\npython3 -m verl.trainer.main_ppo \\\n {arguments} \\\n a.b=$MODEL\n```\nx=1\n"
    command = printed_command(text)
    assert command is not None
    assert command.startswith("MODEL=org/m\npython3 -m verl")
    assert command.endswith("a.b=$MODEL")
    traced = printed_command("+ python3 -m verl.trainer.main_ppo " + arguments.replace("\\\n", ""))
    assert traced is not None
    assert traced.startswith("python3 -m")
    assert printed_command("we run verl with python here") is None
