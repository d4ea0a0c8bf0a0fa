"""A plan as AReaL's configuration (AReaL 1.0.4: `areal/api/cli_args.py`, `PPOConfig`)."""

from __future__ import annotations

from rlhfsim.interchange.areal.form import nested
from rlhfsim.interchange.areal.keys import TABLE
from rlhfsim.interchange.areal.unsaid import unsaid_of
from rlhfsim.interchange.export import Exporter, Written, the_rollout
from rlhfsim.interchange.launch_script import bash, needs_of
from rlhfsim.interchange.predictions import title_of
from rlhfsim.interchange.training_keys import written_for
from rlhfsim.outputs import comment
from rlhfsim.plan import Plan

NEEDS = needs_of("areal")


def write(plan: Plan) -> Written:
    """The plan in AReaL's keys.

    Raises:
        RlhfsimError: a sharing of GPUs, or half-filled nodes, that AReaL has no key for.
    """
    the_rollout(plan, "AReaL's PPOTrainer")
    return written_for(plan, "areal", TABLE.write(plan), unsaid_of(plan))


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The configuration, and the script that names what it leaves open."""
    head = title_of(plan, "AReaL 1.0.4")
    critic = ' critic.optimizer.lr="${CRITIC_LR}"' if plan.placement.role("critic") is not None else ""
    body = "\n".join(
        [
            'exec python3 "${SCRIPT}" --config config.yaml actor.path="${MODEL}" \\',
            '    train_dataset.path="${DATASET}" cluster.fileroot="${FILEROOT}" \\',
            f'    actor.optimizer.lr="${{LR}}"{critic} "$@"',
        ]
    )
    comments = "".join(f"{comment(line)}\n" for line in head.splitlines())
    return {"config.yaml": comments + nested(written), "launch.sh": bash(head, NEEDS, body)}


EXPORT = Exporter(
    version="1.0.4",
    write=write,
    files=files,
    left_open=TABLE.left_open,
    start="bash launch.sh",
    needs=NEEDS,
    install="pip install areal==1.0.4",
)
