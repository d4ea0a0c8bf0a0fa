"""Tables of the keys that frameworks have, by release: what `rlhfsim doctor` compares a configuration with.

    python -m lab.framework_keys SCHEMAS [--recorded 2026-11-22]

SCHEMAS is a folder of JSON files `NAME_RELEASE[_PART].json`, key -> default, as each framework's own parser or
configuration classes give them. Keys without a schema are those of `tests/data/framework_keys`, which name
their source. Facts only: names and defaults.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfsim.interchange.configuration.keys import TABLE

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests/data/framework_keys"
UNKNOWN = "unknown"
"""Default of a key whose list names none."""
LISTED = {
    "areal": ("1.0.4", ("areal.txt",)),
    "nemo-rl": (
        "7ea279a",
        ("nemo_rl.txt", "nemo_rl_dpo.txt", "nemo_rl_sft.txt", "nemo_rl_rm.txt", "nemo_rl_distillation.txt"),
    ),
    "skyrl": ("0.4.0", ("skyrl.txt",)),
    "slime": ("624b824", ("slime.txt",)),
    "trl": ("1.16.0", ("trl.txt",)),
}
"""Framework -> release of its lists of keys, without defaults."""
WITH_RELEASES = {"verl": "verl_sft.txt", "skyrl": "skyrl_sft.txt"}
"""Framework -> list of keys of its trainers of given data: each line has a default, and its releases."""
LAUNCHER = {
    "accelerate_config", "compute_environment", "debug", "deepspeed_config", "distributed_type",
    "downcast_bf16", "dynamo_config", "enable_cpu_affinity", "fp8_config", "fsdp_config", "gpu_ids",
    "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "megatron_lm_config",
    "mixed_precision", "num_machines", "num_processes", "parallelism_config", "rdzv_backend", "same_network",
    "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu",
    "activation_checkpointing", "aio", "communication_data_type", "fp16", "gradient_clipping", "optimizer",
    "prescale_gradients", "scheduler", "steps_per_print", "train_batch_size", "wall_clock_breakdown",
    "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer", "zero_optimization",
    "dataset_name", "dataset_config", "dataset_streaming", "dataset_train_split", "dataset_test_split",
    "ignore_bias_buffers", "reward_model_name_or_path", "reward_funcs",
}  # fmt: skip
"""Keys of accelerate's ClusterConfig (1.x) and of DeepSpeed's configuration, files that TRL's command names,
and of the ScriptArguments of TRL's commands."""
FILES = re.compile(r"(areal|nemo_rl|openrlhf|skyrl|trl|verl)_([\w.@]+?)(?:_(\w*?))?\.json")
DEVELOPMENT = re.compile(r"\.dev|@")
"""Releases that nobody can install by number; a newer table replaces them."""


@dataclass(slots=True)
class Keys:
    """Keys of one framework: release -> key -> defaults, those of its trainers."""

    releases: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def add(self, release: str, key: str, default: Any) -> None:
        """One key of a release."""
        known = self.releases.setdefault(release, {}).setdefault(key.lstrip("-").replace("-", "_"), [])
        if default not in known:
            known.append(default)


def collected(schemas: Path) -> Mapping[str, Keys]:
    """All that a folder of schemas and the lists say."""
    frameworks: dict[str, Keys] = {}
    for path in sorted(schemas.glob("*.json")):
        match = FILES.fullmatch(path.name)
        if match is None or DEVELOPMENT.search(match[2]):
            continue
        keys = frameworks.setdefault(match[1].replace("_", "-"), Keys())
        for key, default in json.loads(path.read_text()).items():
            for value in _defaults(match[1], default):
                keys.add(match[2], key, value)
    for name, (release, lists) in LISTED.items():
        keys = frameworks.setdefault(name, Keys())
        lines = [line for file in lists for line in (LISTS / file).read_text().splitlines()]
        listed = {line.split(" ")[0].lstrip("-").replace("-", "_") for line in lines if line[:1] != "#"}
        known = set(keys.releases.get(release, {}))
        for each in keys.releases if name == "trl" else (release,):
            for key in listed - known:
                keys.add(each, key, UNKNOWN)
    for name, file in WITH_RELEASES.items():
        _add_listed(frameworks[name], (LISTS / file).read_text())
    trl = frameworks["trl"]
    for release, known in list(trl.releases.items()):
        for key in LAUNCHER - known.keys():
            trl.add(release, key, None)
    return frameworks


def _add_listed(keys: Keys, text: str) -> None:
    """The keys of a list with defaults and releases, of releases that have a schema or a list of their own."""
    for line in text.splitlines():
        key, default, *having = line.split()
        for release in keys.releases.keys() & set(having) if key != "#" else ():
            keys.add(release, key, json.loads(default))


def _defaults(framework: str, default: Any) -> Sequence[Any]:
    """Values of a schema: OpenRLHF's parser wraps them, NeMo-RL's examples have several."""
    if framework == "openrlhf":
        return [default["default"]]
    return default if framework == "nemo_rl" else [default]


def rows(keys: Keys, releases: Sequence[str]) -> Iterator[list[Any]]:
    """`[key, first, last, defaults]`, places in the releases; one row as long as the defaults are the same."""
    every = sorted({key for found in keys.releases.values() for key in found})
    for key in every:
        start: int | None = None
        for i, release in enumerate([*releases, ""]):
            now = keys.releases.get(release, {}).get(key)
            before = keys.releases[releases[i - 1]].get(key) if i else None
            if start is not None and now != before:
                yield [key, start, i - 1, before]
                start = None
            if now is not None and start is None:
                start = i


def order(release: str) -> tuple[int, ...]:
    """Order of releases in time."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


def table(name: str, keys: Keys, recorded: str) -> str:
    """The lines of one table: what it is, then its rows."""
    releases = sorted(keys.releases, key=order)
    head = {"framework": name, "releases": releases, "recorded": recorded, "examples": name == "nemo-rl"}
    return "\n".join(json.dumps(line, separators=(",", ":")) for line in [head, *rows(keys, releases)]) + "\n"


def main() -> None:
    """Write the table of every framework into its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--recorded", default="2026-11-22", help="day on which the schemas were read")
    asked = parser.parse_args()
    for name, keys in collected(asked.schemas).items():
        target = ROOT / "rlhfsim/interchange" / name.replace("-", "_") / TABLE
        target.write_bytes(gzip.compress(table(name, keys, asked.recorded).encode(), mtime=0))
        print(f"{name}: {', '.join(keys.releases)}; {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
