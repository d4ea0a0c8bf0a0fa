"""TRL's arguments: one row each, written from a plan and read.

Arguments and defaults: trl/trainer/grpo_config.py, trl/experimental/ppo/ppo_config.py and transformers'
TrainingArguments (TRL 1.16.0); those of `vllm serve`, which runs a rollout on GPUs of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import RoleDescription
from rlhfsim.interchange.configuration.engines import MODULES_SHARE, own_modules
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.fields import Fields, cut
from rlhfsim.interchange.given_data import fields_of, samples_at_once, samples_of
from rlhfsim.interchange.releases import numbers
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import Codec, Table
from rlhfsim.interchange.trl.accelerate import DEEPSPEED, FSDP, OVERLAPS, ROWS, VERSION, trained_by
from rlhfsim.interchange.trl.heads import USUALLY_SINCE, head_of
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.model.presets import elsewhere, preset_name
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.workload.workload import CLIP_RANGES, Algorithm, OldLogprobs, sequences_of

LOSSES: dict[Algorithm, str] = {
    "grpo": "grpo",
    "dr-grpo": "dr_grpo",
    "dapo": "dapo",
    "gspo": "grpo",
    "cispo": "cispo",
}
"""`loss_type` of the GRPO trainer; GSPO's is that of GRPO with ratios of whole responses."""
READ_LOSSES: dict[str, Algorithm] = {"dr_grpo": "dr-grpo", "cispo": "cispo"}
"""Losses that another step than GRPO's follows from."""
RUNS = framework("trl")
SHARED_PREFILL = RUNS.says.prefill[True]
"""Tokens of a prefill of an engine in the training processes."""
SEQUENCES = 256
"""Sequences at a time of a vLLM engine that is told nothing."""
ACCELERATE, SERVER = "accelerate", "server"
"""Titles of the sections that become accelerate.yaml and server.sh."""
EACH_BATCH = tuple(
    f"{group}gradient_accumulation_kwargs.sync_each_batch" for group in ("accelerator_config.", "")
)
"""Key of accelerate that has FSDP reduce gradients after every micro-batch."""
DTYPE, HALVES = ("dtype", "torch_dtype"), ("bfloat16", "float16", "auto")
"""Keys of the type in which weights are loaded, and what means two bytes; FP32 without them.

Source: TRL 0.19.0 to 1.16.0, trainer/model_config.py (line 89 of 1.16.0; None until 0.26, for which
transformers 4 takes FP32) and create_model_from_path of trainer/utils.py (line 1332).
"""
CORRECTS_SINCE = (0, 23)
"""First release that corrects for the engine, for which it always computes old log-probs under vLLM.

Source: TRL 0.22.0 and 0.23.0, _generate_and_score_completions of trainer/grpo_trainer.py (lines 1331, 1371).
"""
ONE_GROUP_SINCE = (0, 29)
"""First release read whose reference under FSDP2 is one group; 0.25 wraps it as FSDP1."""
TRAINER, ADAPTERS, RANK = "trainer", "use_peft", "lora_r"
"""Keys of the class that trains, and of adapters."""
GIVEN: dict[str, Algorithm] = {"SFT": "sft", "Reward": "reward_model", "DPO": "dpo", "KTO": "kto"}
"""Beginning of a trainer's name -> what it learns from given data by."""
MARKS = (
    "per_device_train_batch_size",
    "num_generations",
    "steps_per_generation",
    "max_completion_length",
    "vllm_mode",
    "use_vllm",
    DEEPSPEED,
    FSDP,
)
"""Beginnings of keys that no other framework has."""


# --- batches ------------------------------------------------------------------------------------------------


def accumulation(plan: Plan) -> int:
    """Micro-batches of a rank in one optimizer step.

    Raises:
        RlhfsimError: the samples of an optimizer step do not split into them.
    """
    layout, samples = plan.placement.actor.layout, samples_of(plan)
    each = layout.dp * samples_at_once(plan)
    if samples % each:
        raise RlhfsimError(
            "batch-not-cut-by-micro-batches",
            f"TRL accumulates whole micro-batches: {samples} samples of an optimizer step are no multiple "
            f"of {layout.dp} ranks x {each // layout.dp}",
            help="design with --prompts, --samples and --mini-batches that the GPUs divide",
        )
    return samples // each


def _batch(plan: Plan) -> str:
    work = plan.workload
    return f"{work.prompts} prompts x {work.samples} samples, {work.mini_batches} optimizer steps a batch"


def _whole_generation(read: Fields) -> int:
    """Micro-batches of a process between two generations, where they are not said as such."""
    samples, each = read["generation"], read["actor.micro_batch"] * max(1, read["actor.gpus"])
    return max(1, samples // each) if samples else int(read["accumulation"])


def optimizer_steps(s: FrameworkSettings) -> int:
    """Optimizer steps from one generation to the next: `step_time` is of one."""
    return _steps(TABLE.read(s))


def _steps(read: Fields) -> int:
    return max(1, int(read["per_generation"]) * int(read["workload.epochs"]) // int(read["accumulation"]))


def samples_of_generation(s: FrameworkSettings) -> int:
    """Samples of all processes from one generation to the next."""
    return _samples(TABLE.read(s))


def _samples(read: Fields) -> int:
    return int(read["actor.gpus"] * read["actor.micro_batch"] * read["per_generation"])


# --- what no row can say ------------------------------------------------------------------------------------


def trainer_of(s: FrameworkSettings) -> str:
    """Name of the class that trains."""
    return s.text(TRAINER, default="GRPOTrainer")


def _given(trainer: str) -> Algorithm | None:
    """What it learns from given data by; None: it generates."""
    return next((algorithm for name, algorithm in GIVEN.items() if trainer.startswith(name)), None)


def _before(s: FrameworkSettings, release: tuple[int, int]) -> bool:
    """Whether the release is known, and older than this."""
    version = s.find("trl_version")
    return version is not None and numbers(str(version))[:2] < release


def _algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the trainer and its loss."""
    trainer = trainer_of(s)
    if (given := _given(trainer)) is not None:
        return given
    if "RLOO" in trainer:
        return "rloo"
    if s.find("importance_sampling_level") == "sequence":
        return "gspo"
    return READ_LOSSES.get(s.text("loss_type", default=""), "grpo")


def _reward(s: FrameworkSettings) -> str | None:
    """The reward model among the rewards; None: functions, by their names, or a model that is not known."""
    named = s.find("reward_model_name_or_path", "reward_funcs")
    names = [str(name) for name in (named if isinstance(named, list) else [named])]
    return next((name for name in names if preset_name(name) or elsewhere(name)), None)


def _old_logprobs(s: FrameworkSettings, read: Fields) -> OldLogprobs:
    """Training pass's log-probs where one update follows a generation and nothing corrects for the engine.

    grpo_trainer.py: without `old_per_token_logps` the loss takes its own, detached. Several passes over
    samples within one optimizer step need none either, which a workload cannot say: it has no forward.
    Releases before 0.23 correct nothing.
    """
    asked = s.flag("vllm_importance_sampling_correction", default=True)
    corrected = read["vllm"] and asked and not _before(s, CORRECTS_SINCE)
    if _steps(read) > 1 or corrected or _algorithm(s) == "rloo":  # RLOOTrainer always computes them
        return "recompute"
    return "reused" if read["workload.epochs"] == 1 else "rollout"


def _software(s: FrameworkSettings, read: Fields) -> Software | None:
    """Accelerate's FSDP is FSDP1 by default; before 1.15 Liger's loss goes through one response at a time.
    None: as `runs` has both."""
    version, trainer = s.find("trl_version"), trainer_of(s)
    older = _before(s, USUALLY_SINCE)
    liger = older and read["rollout"] and s.flag("use_liger_kernel", "use_liger_loss")
    head = head_of(trainer, None if version is None else str(version))
    usual = RUNS.software.get(read["backend"]) or default_software(read["backend"])
    fsdp = read["backend"] == "fsdp2"
    if liger:
        head = replace(heads_of("trl")["liger"], tokens=read["limit.response"])
    known = replace(
        usual,
        head=head if older else None,
        flat_parameters=fsdp and s.whole(VERSION, default=1) == 1,
        sums_whole=fsdp and not s.flag(*EACH_BATCH),
        overlaps_reduction=fsdp or s.flag(*OVERLAPS),
        plain_bytes=None if fsdp else usual.plain_bytes if read["actor.zero"] else _loaded(s),
        plain_scored=not fsdp and read["actor.zero"] == 0 and read["actor.gpus"] > 1,
        whole_reference=fsdp and not _before(s, ONE_GROUP_SINCE),
    )
    return None if known == usual else known


def _loaded(s: FrameworkSettings) -> float:
    """Bytes of a weight as it is loaded: without ZeRO and FSDP it is trained, and scores, in that type."""
    said = s.find(*DTYPE, *(f"model_init_kwargs.{key}" for key in DTYPE))
    return 2.0 if str(said).rpartition(".")[2] in HALVES else 4.0


def _longest_prompt(s: FrameworkSettings, read: Fields) -> int | None:
    """What a response leaves of the engine's length: TRL cuts no prompts."""
    both = s.count("vllm_max_model_length", "max_model_len")
    return max(1, both - read["limit.response"]) if both else None


def _per_node(read: Fields) -> int:
    gpus, nodes = int(read["actor.gpus"]), int(read["actor.nodes"])
    return max(1, gpus // nodes) if nodes > 1 else min(8, gpus)


def _ppo(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    """A PPOConfig: the policy's own modules generate, and the value model starts from the reward model."""
    reward = s.text("reward_model_path", "reward_model")
    together = max(1, s.whole("local_rollout_forward_batch_size", default=64))
    scored = RoleDescription(layout=cut(read, read["actor.gpus"], micro_batch=together))
    return {
        "actor.score_micro_batch": together,
        "workload.algorithm": "ppo",
        "workload.model": s.model("sft_model_path", "model_name_or_path", "model"),
        "workload.critic": reward,
        "workload.reward.model": reward,
        "workload.prompts": max(1, read["actor.gpus"] * read["actor.micro_batch"] * read["accumulation"]),
        "workload.samples": 1,
        "workload.epochs": s.whole("num_ppo_epochs", default=4),
        "workload.mini_batches": max(1, s.whole("num_mini_batches", default=1)),
        "kl": True,
        "limit.response": s.whole("response_length", default=53),
        "roles": {"reference": scored, "reward": scored},
        "rollout.max_num_seqs": SEQUENCES,
        "rollout.memory_utilization": MODULES_SHARE,
        **_modules(read),
    }


def _modules(read: Fields) -> dict[str, Any]:
    """The policy's own modules generate."""
    own = own_modules(read["actor.zero"])
    return {"rollout.sleep": own.get("sleep", 0), "weight_path": own["weight_path"]}


def _engine(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    """The engine that generates: in the processes that train, or started by `vllm serve` on its own GPUs."""
    if not read["vllm"]:
        return {"rollout.max_num_seqs": SEQUENCES, **_modules(read)}
    if read["shared"]:
        sequences = read["actor.micro_batch"] * read["per_generation"] * read["rollout.tp"]
        return {
            "rollout.max_num_seqs": sequences,
            "rollout.max_batched_tokens": SHARED_PREFILL,
            "weight_path": "ipc",
        }
    each = read["rollout.tp"] * read["rollout.pp"]
    gpus = s.whole("vllm_gpus", default=each * read["rollout.dp"])
    return {"rollout.gpus": gpus, "rollout.dp": gpus // max(1, each), "weight_path": "broadcast"}


def _groups(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    """A GRPOConfig or an RLOOConfig."""
    return {
        "workload.algorithm": _algorithm(s),
        "workload.model": s.model("model_name_or_path", "model"),
        "workload.reward.model": _reward(s),
        "workload.prompts": max(1, _samples(read) // max(1, read["workload.samples"])),
        "workload.mini_batches": max(1, read["per_generation"] // read["accumulation"]),
        "workload.old_logprobs": _old_logprobs(s, read),
        "limit.prompt": _longest_prompt(s, read),
        **_engine(s, read),
    }


def _data(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    """Given pairs, labels or responses; rows that are packed are full."""
    algorithm: Algorithm = read["given"]
    samples = read["actor.gpus"] * read["actor.micro_batch"] * read["accumulation"]
    model = s.model("model_name_or_path", "model")
    said = fields_of(algorithm, model=model, samples=samples, limit=read["limit.total"])
    return {
        **said,
        "actor.micro_batch": sequences_of(algorithm) * read["actor.micro_batch"],
        "kl": said["kl"] and not s.flag("precompute_ref_log_probs"),
    }


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    s.overruled("args", "processing_class", "callbacks", "num_gpus", TABLE.key("rollout.sleep"))
    s.overruled(*TABLE.names("actor.offload_optimizer"), *TABLE.names("actor.offload_params"))
    fsdp = read["backend"] == "fsdp2"
    return {
        "backend": read["backend"],
        "software": _software(s, read),
        "actor.each": s.whole("gpus_per_node", default=_per_node(read)),
        "actor.offload_params": read["actor.offload_optimizer"] if fsdp else read["actor.offload_params"],
        "workload.packing": bool(read["full"]),
        **(_data if read["given"] else _groups if read["rollout"] else _ppo)(s, read),
    }


def _kl(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> bool:
    return s.share(*keys, default=0.0) != 0


# --- the rows -----------------------------------------------------------------------------------------------


TABLE = Table(
    lambda: (
        rows_of("trl", ROWS, "accelerate")
        | rows_of(
            "trl",
            {
                "ADAPTERS": ADAPTERS,
                "LOSSES": LOSSES,
                "RANK": RANK,
                "SEQUENCES": SEQUENCES,
                "batch": _batch,
                "kl": Codec(lambda kl: 0.001 if kl else 0.0, _kl),
                "whole_generation": _whole_generation,
                "widest": lambda plan: 1 + CLIP_RANGES["cispo"][1],
                "without": lambda plan: "" if plan.placement.role("reference") else "no reference model",
            },
        )
    ),
    _rest,
    {
        "pairs": lambda plan: plan.workload.paired,
        "given": lambda plan: not plan.workload.generates,
        "full": lambda plan: False,
        "accumulation": accumulation,
        "per_generation": lambda plan: accumulation(plan) * plan.workload.mini_batches,
        "adapters": lambda plan: plan.workload.lora is not None,
        "vllm": lambda plan: plan.placement.rollout is not None,
    },
    {
        "backend": lambda s, read: trained_by(s),
        "given": lambda s, read: _given(trainer_of(s)),
        "workload.algorithm": lambda s, read: _algorithm(s),
        "rollout": lambda s, read: not read["given"] and not trainer_of(s).startswith("PPO"),
        "generation": lambda s, read: s.count("generation_batch_size"),
        "shared": lambda s, read: True,
    },
)
