"""Keys that a framework has, by release, and those of a configuration that no reader reads.

Tables: `keys.jsonl.gz` of each framework, written by `python -m lab.framework_keys`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal

from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.releases import nearest_release, numbers

TABLE = "keys.jsonl.gz"
Kind = Literal["may change", "no such key", "no effect", "default"]
"""What a key that is not read does: it may change time or memory, the release has none, it changes neither,
or it says what the release does anyway."""
NO_EFFECT = re.compile(
    r"""(^|\.)(
        hydra|wandb\w*|swanlab\w*|mlflow\w*|tensorboard\w*|logger|stats_logger|\w*profiler\w*|name_resolve
        |checkpoint|checkpointing|saver|recover|evaluator|val_kwargs|valid_dataset|eval_\w+|eval
        |defaults|config(_\w+)?|_target_
        |(\w+_)?(project|experiment|run|trial|group|cluster|dataset|job|user|exp|team|entity)_name
        |(?!\w*(?:function|agent|plugin))(\w+_)?(path|paths|dir|dirs|directory|folder|root|file|files|fileroot|key|keys|column|split|entity|team)
        |(\w+_)?(url|urls|host|ip|addr|address|port|env_vars|env_class)
        |(\w+_)?seed|(\w+_)?(lr|learning_rate)|lr_\w+|min_lr\w*|\w*warmup\w*|\w*weight_decay\w*
        |(adam_)?betas?\d?|(adam_)?(eps|epsilon)|\w*clip\w*|\w*coeff?|\w*_coeff?_\w+|gamma|lambd|lam|momentum
        |temperature|top_[pk]|min_p|repetition_penalty|\w*loss_agg_mode|\w*norm_adv\w*|kl_\w+|\w*penalty
        |logging_\w+|log_\w*(interval|freq|level|steps|completions|samples)|\w*verbose|report_to|run_name
        |\w*save_\w+|save|\w*ckpt\w*|resume\w*|load|push_to_hub|hub_\w+
        |test_freq|val_\w+|n_val|\w*_val|\w*val_batch_size|log_val_generations
        |total_epochs|max_num_(steps|epochs)|max_val_samples|teacher\.generation|total_train\w+|total_training_steps|max_steps|max_epochs|num_(train_)?epochs|num_rollout
        |num_episodes|tokenizer\w*|trust_remote_code|\w*chat_template\w*|shuffle\w*|multiturn|ignore_input_ids_mismatch|num_steps|train_on_what|pin_memory|dummy_run_max_steps|\w*datasets|\w*dataset_(splits?|names|weights)|\w*reward_fn\w*|rm_type
        |\w*num_workers|\w*_key|return_raw_chat|truncation|filter_overlong_prompts\w*|prompt_data|prompt_dataset
        |critic_warmup|remove_unused_columns|dataset\w*|reward_funcs|train_data|val_data|input_key|label_key
        |(\w+_)?alpha|(adv|reward)_norm|normalize_\w+|scale_rewards|loss_reduction|reward_shaping|kl|scheduling_spec
        |(train|valid)_dataset\.type|scheduler\.type|compute_environment|downcast_bf16|machine_rank|same_network
        |main_training_function|rdzv_backend|main_process_\w+|fsdp_state_dict_type|fsdp_cpu_ram_efficient_loading
        |zero3_init_flag|overlong_\w+|apply_overlong\w*|token_level_loss|calculate_per_token_loss|num_epoch|deterministic\w*|disable_dropout|\w*dropout
    )(\.|$)""",
    re.VERBOSE,
)
"""Keys that change neither the time nor the memory of a step, whatever they say."""
PRICED = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r"(^|\.)(rollout|generation|inference_engine)\.(name|backend)$", "vllm"),
        (r"(^|\.)bf16$", "true"),
        (r"(^|\.)mixed_precision$", "bf16"),
        (r"(^|\.)optimizer\.type$", "adam"),
        (r"(^|\.)recompute_method$", "uniform"),
        (r"(^|\.)recompute_num_layers$", "1"),
    )
)
"""Keys, and the value of each that is priced although nothing reads it."""
READ = 0.3
"""What it adds to the similarity of a name, between 0 and 2, that the doctor reads the key."""
OPEN = re.compile(r"(^|\.)(override_\w+|\w*kwargs|extra_\w+|env_vars|\w+_overrides)\.")
"""Groups of keys that are handed on to another library, whose keys are not listed."""


@frozen
class RecordedKey:
    """A key from one release to another."""

    first: int
    last: int
    defaults: tuple[str, ...]
    """As compared; those of several trainers."""


@frozen
class KeyTable:
    """Keys of a framework."""

    releases: tuple[str, ...]
    """Oldest first."""
    recorded: str
    """Day on which they were read."""
    examples: bool
    """Whether they are those that its examples use: it may have others."""
    keys: dict[str, tuple[RecordedKey, ...]]

    def place(self, version: str | None) -> int:
        """Release that a version reads by, as a number: the nearest patch of its minor version, else the last
        that is not newer; without a version the newest.

        `0.7` is the last 0.7.x.
        """
        newest, wanted = len(self.releases) - 1, numbers(version or "")
        if version in self.releases or not wanted:
            return self.releases.index(version) if version in self.releases else newest
        if (alike := nearest_release(version or "", self.releases)) is not None:
            return self.releases.index(alike)
        older = (i for i, release in enumerate(self.releases) if numbers(release)[: len(wanted)] <= wanted)
        return max(older, default=0)

    def at(self, key: str, place: int) -> RecordedKey | None:
        """A key of a release."""
        return next((k for k in self.keys.get(key, ()) if k.first <= place <= k.last), None)

    def opens(self, key: str, place: int) -> bool:
        """Whether a key lies in a group that takes any."""
        parts = key.split(".")
        above = (self.at(".".join(parts[:i]), place) for i in range(1, len(parts)))
        return bool(OPEN.search(key)) or any(k and {"none", "{}"} & {*k.defaults} for k in above)


@frozen
class Unread:
    """A key that a configuration sets and no reader reads."""

    key: str
    value: Any
    kind: Kind
    nearest: str | None = None
    """The key of the release with the most similar name, where it has none of this name."""
    until: str | None = None
    """The last release before the one at hand that had it."""
    since: str | None = None
    """The first release after the one at hand that has it, where none before had it."""
    matters: bool = False
    """Whether it may change time or memory, or is misspelt and its nearest key may."""


def _table_file(framework: str) -> Traversable:
    return resources.files("rlhfsim.interchange") / framework.replace("-", "_") / TABLE


@cache
def key_table(framework: str) -> KeyTable:
    """Keys of a framework by name."""
    text = gzip.decompress(_table_file(framework).read_bytes()).decode()
    head, *rows = (json.loads(line) for line in text.splitlines())
    keys: dict[str, tuple[RecordedKey, ...]] = {}
    for name, first, last, defaults in rows:
        known = RecordedKey(first=first, last=last, defaults=tuple(map(_plain, defaults)))
        keys[name] = (*keys.get(name, ()), known)
    return KeyTable(
        releases=tuple(head["releases"]), recorded=head["recorded"], examples=head["examples"], keys=keys
    )


def unread(framework: str, version: str | None, s: FrameworkSettings) -> tuple[Unread, ...]:
    """Every key of the user's own that nothing asked for; what matters first, none without a table."""
    if not _table_file(framework).is_file():
        return ()
    table = key_table(framework)
    place, asked = table.place(version), s.asked.keys | {framework.replace("-", "_") + "_version"}
    groups = tuple(key for key in asked if key.endswith("."))
    left = sorted(key for key in s.asked.own - asked if not key.startswith(groups))
    found = [_unread(table, place, key, s) for key in left]
    order = ("no such key", "may change", "no effect", "default")
    return tuple(sorted(found, key=lambda u: (not u.matters, order.index(u.kind))))


def as_written(left: Iterable[Unread], written: Mapping[str, Any]) -> tuple[Unread, ...]:
    """The same, but those that say what the export of the run would write: it is priced."""
    says = {key.lstrip("+-").replace("-", "_"): _plain(value) for key, value in written.items()}
    return tuple(
        replace(u, kind="default", matters=False) if says.get(u.key) == _plain(u.value) else u for u in left
    )


def _unread(table: KeyTable, place: int, key: str, s: FrameworkSettings) -> Unread:
    value, known = s.values.get(key), table.at(key, place)
    if _is_usual(value, known, key, s) or any(p.search(key) and _plain(value) == x for p, x in PRICED):
        return Unread(key=key, value=value, kind="default")
    if known is not None or table.opens(key, place):
        plain = bool(NO_EFFECT.search(key))
        return Unread(key=key, value=value, kind="no effect" if plain else "may change", matters=not plain)
    here = [name for name in table.keys if table.at(name, place) is not None]
    near = nearest(key, here, s.asked.keys)
    before = max((k.last for k in table.keys.get(key, ()) if k.last < place), default=None)
    after = min((k.first for k in table.keys.get(key, ()) if k.first > place), default=None)
    return Unread(
        key=key,
        value=value,
        kind="no such key",
        nearest=near,
        until=None if before is None else table.releases[before],
        since=None if after is None or before is not None else table.releases[after],
        matters=not NO_EFFECT.search(near or key) and not NO_EFFECT.search(key),
    )


def _is_usual(value: Any, known: RecordedKey | None, key: str, s: FrameworkSettings) -> bool:
    """Whether a value is one of the defaults, as it is written or as its references resolve."""
    ways = {_plain(value), _plain(s.resolved(value, key))}
    return known is not None and any(
        {_plain(default), _plain(s.resolved(default, key))} & ways for default in known.defaults
    )


def nearest(key: str, known: Iterable[str], read: Container[str] = ()) -> str | None:
    """The key whose group and last part are most similar, rather one that is `read`; None: none is."""
    last = key.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    close = [name for part in get_close_matches(last, by_last, n=5, cutoff=0.7) for name in by_last[part]]
    return max(close, key=lambda name: _alike(key, name) + READ * (name in read), default=None)


def _alike(key: str, name: str) -> float:
    halves = zip(key.rpartition(".")[::2], name.rpartition(".")[::2], strict=True)
    return sum(SequenceMatcher(None, ours, theirs).ratio() for ours, theirs in halves)


def _plain(value: Any) -> str:
    """A value as it is compared: numbers by their size, nothing as `none`."""
    word = str(value).strip().lower()
    if word in ("", "null", "none", "~", "???"):
        return "none"
    try:
        return f"{float(word):g}"
    except ValueError:
        return re.sub(r"[\s'\"]", "", word)
