"""A question drawn at random: the words of `rlhfsim design`, a way to look at it, and the commands asked after it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

GPUS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128)
MANY_GPUS = (136, 192, 256, 320, 384, 512, 768, 1000, 1024, 2048, 4096, 8192, 16384)
MODELS = {
    "qwen2.5-0.5b": 1,
    "qwen2.5-1.5b": 1,
    "8b": 4,
    "qwen3-8b": 3,
    "14b": 2,
    "32b": 3,
    "70b": 6,
    "405b": 4,
    "671b": 4,
    "kimi-k2": 3,
    "qwen3-30b-a3b": 3,
    "qwen3-235b-a22b": 4,
    "mixtral-8x7b": 1,
    "olmoe-1b-7b": 1,
    "gpt-oss-20b": 1,
    "llama-4-scout": 1,
}
"""Model -> how often, in parts."""
FEW_GPUS = (1, 2, 2, 4, 4, 6, 8, 8, 12)
SMALL = (
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "8b",
    "qwen3-8b",
    "14b",
    "qwen3-30b-a3b",
    "olmoe-1b-7b",
    "gpt-oss-20b",
)
LARGE = ("70b", "405b", "671b", "kimi-k2", "qwen3-235b-a22b", "32b")
ALGORITHMS = {
    **{"ppo": 6, "grpo": 8, "dapo": 2, "gspo": 1, "cispo": 1, "dr-grpo": 1, "rloo": 2, "reinforce++": 2},
    **{"dpo": 2, "kto": 1, "sft": 2, "reward_model": 1},
}
GRADIENT_ONLY = ("dpo", "kto", "sft", "reward_model")
"""Algorithms that generate nothing."""
OF_ANY = (
    *("--gpu h200", "--gpu b200", "--gpu a100-80", "--gpu gb200", "--gpu mi300x", "--gpu h20", "--gpu l40s"),
    *("--backend megatron", "--backend fsdp2", "--backend deepspeed"),
    *("--framework any", "--framework verl", "--framework nemo-rl", "--framework slime", "--framework trl"),
    *("--framework openrlhf", "--framework skyrl", "--framework areal"),
    *("--objective cost", "--objective memory", "--objective energy", "--objective tokens"),
    *("--prompts 256", "--prompts 64", "--epochs 2", "--mini-batches 2", "--prompt-len 512", "--no-packing"),
    *("--response-len 4096", "--response-len lognormal:mean=2000,sigma=0.8,max=8192", "--response-len 256"),
    *("--oversubscription 2", "--price spot", "--price 2.5", "--price reserved", "--max-oom 0.01"),
    *("--steps 500 --deadline 7d", "--steps 200 --budget 50kUSD", "--steps 1000", "--fastest", "--seed 3"),
    *("--steps 500 --deadline 3d --budget 100kUSD", "--require step_time<120s", "--require memory<70GB"),
    *("--fix actor.tp=8", "--fix actor.tp<=4", "--fix actor.pp=2", "--forbid offload", "--forbid recompute"),
    *("--allow lora", "--allow bf16-gradients", "--allow fp8-training", "--gpus-per-node 4", "--forbid hsdp"),
)
GENERATING = (
    *("--allow async", "--allow async,rollout-logprobs", "--allow fp8,fp8-kv", "--allow lora,qlora"),
    *("--samples 4", "--samples 16", "--rules seconds_per_sample=5ms,workers=64", "--oversampling 0.25"),
    *("--environment turns=4,seconds_per_turn=2s,workers=256", "--dynamic-sampling 0.6", "--no-kl"),
    *("--speculation method=eagle,draft_tokens=3,acceptance=0.65", "--architecture disaggregated"),
    *("--architecture hybrid", "--architecture async", "--architecture smart", "--weight-path broadcast"),
    *(
        "--weight-path disk",
        "--forbid async",
        "--why-not async",
        "--why-not disaggregated",
        "--fix rollout.tp=8",
    ),
    *("--max-gpus-per-role 32", "--allow async --max-staleness 4"),
)
LIMITS = ("1s", "2s", "5s", "20s")
VIEWS = ((), (), ("--json",), ("--detail", "all"), ("--detail", "proof"))
AFTER = ("report", "memory", "sync", "export", "simulate", "diff")
CHEAP = tuple(name for name in AFTER if name != "report")
SMALL_LIMIT = "0.1s"
WHOLE, REPORTED = 0.04, 0.02
"""Shares of the small questions whose search has no limit, on few GPUs, and whose plan becomes a page."""
EXPORTED_TO = ("verl", "nemo-rl", "slime", "openrlhf", "trl", "skyrl", "areal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, in the order of asking."""

    number: int
    words: tuple[str, ...]
    """Arguments of `rlhfsim design`."""
    view: tuple[str, ...]
    after: tuple[str, ...]
    """Commands asked of the plan, `estimate` aside, which always is."""
    exported_to: str
    """The framework of an export, where the plan names none."""


def small(number: int, seed: int) -> Question:
    """Question `number` of `seed` on up to 12 GPUs, whose search mostly ends at once."""
    rng = Random(f"small:{seed}:{number}")
    whole = rng.random() < WHOLE
    gpus = rng.choice((1, 2) if whole else FEW_GPUS)
    words = _words(rng, gpus, rng.choice(SMALL[:2] if whole else SMALL))
    words += [] if whole else ["--time-limit", SMALL_LIMIT]
    after = tuple(rng.sample(CHEAP, 2))
    if rng.random() < REPORTED:
        after += ("report",)
    return _question(rng, number, words, after)


def draw(number: int, seed: int, *, quick: bool = False) -> Question:
    """Question `number` of `seed`; where `quick`, searches over 64 GPUs end after 2 s."""
    rng = Random(f"{seed}:{number}")
    many = rng.random() < 0.5
    gpus = rng.choice(MANY_GPUS if many else GPUS)
    model = rng.choice(LARGE) if many and rng.random() < 0.7 else _weighted(rng, MODELS)
    words = _words(rng, gpus, model)
    limit = rng.choice(LIMITS) if rng.random() < 1 / 3 else None
    if quick and gpus > 64:
        limit = rng.choice(("1s", "2s"))
    if limit:
        words += ["--time-limit", limit]
    return _question(rng, number, words, tuple(rng.sample(AFTER, 2)))


def _words(rng: Random, gpus: int, model: str) -> list[str]:
    """Words of `rlhfsim design`: GPUs, model, an algorithm and up to three options."""
    algorithm = _weighted(rng, ALGORITHMS)
    options = OF_ANY if algorithm in GRADIENT_ONLY else OF_ANY + GENERATING
    words = ["--gpus", str(gpus), "--model", model, "--algorithm", algorithm]
    for option in _without_repeats(rng.sample(options, rng.choice((0, 0, 1, 1, 2, 2, 3)))):
        words += option.split(" ")
    return words


def _question(rng: Random, number: int, words: list[str], after: tuple[str, ...]) -> Question:
    view = rng.choice(VIEWS)
    return Question(
        number=number, words=tuple(words), view=view, after=after, exported_to=rng.choice(EXPORTED_TO)
    )


def _weighted(rng: Random, shares: dict[str, int]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


def _without_repeats(options: list[str]) -> list[str]:
    """The options whose first word none before has."""
    by_name: dict[str, str] = {}
    for option in options:
        by_name.setdefault(option.split(" ")[0], option)
    return list(by_name.values())
