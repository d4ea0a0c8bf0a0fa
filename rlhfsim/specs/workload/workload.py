"""What one RLHF step must compute: algorithm, batch, lengths, rewards, and the models other than the
policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.quantities import MAX_MAGNITUDE, Bytes, Seconds, Share
from rlhfsim.specs.workload.lengths import Fixed, Lengths, stats
from rlhfsim.specs.workload.sampling import DynamicSampling

OldLogprobs = Literal["recompute", "rollout", "reused"]
Algorithm = Literal[
    "ppo",
    "grpo",
    "dr-grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce++",
    "dpo",
    "kto",
    "sft",
    "reward_model",
    "distillation",
]
PolicyLoss = Literal["ppo", "gspo", "cispo"]
"""ppo: the ratio of each token is clipped; gspo: that of the response; cispo: the clipped ratio is a weight
without gradient."""
Precision = Literal["bf16", "fp16", "fp8", "fp4"]
"""Precision of matrix products."""
Count = Annotated[int, Field(ge=1, le=10_000_000)]
GROUPED: frozenset[str] = frozenset({"grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo"})
"""Algorithms that compare the responses of one prompt with each other."""
ONLINE: frozenset[str] = GROUPED | {"ppo", "reinforce++", "distillation"}
"""Algorithms that generate; the others learn from given pairs, labels or responses."""
PAIRED: frozenset[str] = frozenset({"dpo", "reward_model"})
"""Algorithms that learn from a chosen and a rejected response to each prompt."""
REFERRED: frozenset[str] = frozenset({"dpo", "kto", "distillation"})
"""Algorithms whose loss compares with a reference, whatever the KL; that of distillation is the teacher."""
WITHOUT_KL: frozenset[str] = frozenset({"dapo"})
"""Algorithms that have no KL term unless a file says so (arXiv 2503.14476, section 2.3)."""
CLIP_RANGES: Mapping[str, tuple[float, float]] = {
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""How far below and above 1 the policy's ratio counts, where it is not 0.2 both ways. DAPO, arXiv 2503.14476,
section 4.1; GSPO, arXiv 2507.18071, section 5.1; CISPO has no lower bound (arXiv 2506.13585), its upper one
is that of ScaleRL, arXiv 2510.13786 (TRL's `epsilon_high` 5)."""


USUAL: int = cast(int, None)
"""A count that nobody gave."""


MAX_SEQUENCES = 1_000_000
"""Most sequences of one step; a larger batch is a slip."""
AT_MOST = (
    f"at most {MAX_SEQUENCES:,} sequences per step: every length is drawn and simulated, so that a design of "
    "so many takes minutes, of ten times as many most of an hour"
)
"""The limit and what it saves; 65,536 sequences on 8 GPUs take 11 s of CPU, 8,192 take 6 s."""


def usual_batch(algorithm: str) -> dict[str, int]:
    """Prompts and samples of a step where none are given: 1,024 sequences, in groups of 8 where compared.

    Groups of 8: TRL's default for GRPO, and OpenRLHF's and SkyRL's examples; one response is no group.
    """
    return {"prompts": 128, "samples": 8} if algorithm in GROUPED else {"prompts": 1024, "samples": 1}


def with_usual_kl(data: Any) -> Any:
    """A workload of a file, without KL term where its algorithm usually has none and it does not say."""
    if not isinstance(data, dict) or "algorithm" not in data:
        return data
    without_kl = {"kl": False} if str(data["algorithm"]) in WITHOUT_KL else {}
    return {**without_kl, **data}


@checked
@frozen
class Rules:
    """Rewards computed on CPUs (answer matcher, format checker, code executor) or by a remote judge."""

    seconds_per_sample: Seconds = 0.005
    """Seconds to score a sample; of a judge its latency."""
    workers: Count = 64
    """Parallel CPU workers over the whole cluster; of a judge its requests at once."""


@checked
@frozen
class Reward:
    """Where rewards come from; a model, rules, or both (then summed)."""

    model: str | None = None
    """A model name, `same` (as the policy), or none."""
    rules: Rules | None = None
    overlapped: bool = True
    """Rules run while reference and reward models infer."""


@checked
@frozen
class Environment:
    """A tool or task environment that answers between the turns of a response, on CPUs."""

    turns: Count = 1
    """Most turns of a response, of equal length; the environment answers after each."""
    mean_turns: Annotated[float, Field(ge=1)] | None = None
    """Mean turns, where a response may end after each with equal odds; None: all have `turns`."""
    seconds_per_turn: Seconds = 0.5
    """Mean of one answer to one sequence."""
    sigma: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Standard deviation of the log of an answer's seconds, which are log-normal; 0: all alike."""
    workers: Count = 64
    """Parallel CPU workers over the whole cluster."""
    answer_tokens: Annotated[float, Field(ge=0)] = 0.0
    """Mean tokens of one answer, prefilled and not decoded; `prompt_len` holds those of all answers."""
    prefix_reuse: Share = 1.0
    """Share of a response's context that the prefix cache still has at its next turn."""
    lockstep: bool = False
    """A turn begins when all sequences of the batch are answered; else each goes on by itself."""
    cold_start: Seconds = 0.0
    """Time in which a worker makes the sandbox of a response that finds none ready."""
    warm: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Sandboxes that are ready when a batch begins; they are made again while the GPUs train."""
    sandbox_memory: Annotated[Bytes, Field(le=MAX_MAGNITUDE)] = 0.0
    """Host memory of a sandbox, which a response holds from its first token to its last."""
    fleet_memory: Annotated[Bytes, Field(gt=0, le=MAX_MAGNITUDE)] | None = None
    """Host memory for sandboxes over the whole CPU fleet; None: enough for all."""

    def __post_init__(self) -> None:
        """Check that the mean is below the most, and that what is warm has room."""
        most = self.sandboxes
        if most is not None and most < max(1, self.warm):
            raise RlhfsimError(
                "fleet-too-small",
                f"the fleet's memory holds {most} sandboxes, and {max(1, self.warm)} must be there at once",
                help="give more fleet_memory, or fewer warm",
            )
        if self.mean_turns is not None and self.mean_turns > self.turns:
            raise RlhfsimError(
                "mean-turns-above-most",
                f"mean_turns {self.mean_turns:g} is above the most of {self.turns} turns",
                help="turns is the most of a response, mean_turns the mean of all",
            )

    @property
    def varies(self) -> bool:
        """Whether sequences differ in their turns or answers."""
        return not self.lockstep and (self.sigma > 0 or self.mean_turns is not None)

    @property
    def sandboxes(self) -> int | None:
        """Most responses that run at a time for the fleet's memory; None: any number."""
        if self.fleet_memory is None or not self.sandbox_memory:
            return None
        return int(self.fleet_memory / self.sandbox_memory)

    def made(self, sequences: int) -> int:
        """Responses of a batch whose sandbox is made when they begin."""
        return max(0, sequences - self.warm) if self.cold_start else 0

    @property
    def turns_each(self) -> float:
        """Mean turns of a response."""
        return self.mean_turns or self.turns

    @property
    def answers_total(self) -> float:
        """Mean tokens of all answers of a response that are read."""
        return (self.turns_each - 1) * self.answer_tokens

    @property
    def seconds_each(self) -> float:
        """Mean seconds of all answers to one sequence."""
        return self.turns_each * self.seconds_per_turn


@checked
@frozen
class OwnParts:
    """Seconds that the user's own parts of the algorithm take for each sample of a step."""

    loss: Seconds = 0.0
    """On a GPU of the trainer, in each pass, beyond what the loss that it replaces takes."""
    advantages: Seconds = 0.0
    sampler: Seconds = 0.0
    filter: Seconds = 0.0
    logger: Seconds = 0.0
    """Like the three before it in the process that drives the step, one sample after the other."""

    @property
    def driver_s(self) -> dict[str, float]:
        """Seconds of a sample by the name of its phase, of those parts that the driver runs."""
        names = ("sampler", "filter", "advantages", "logger")
        each = {f"custom.{name}": getattr(self, name) for name in names}
        return {name: seconds for name, seconds in each.items() if seconds}


GradientSums = Literal["backend", "bf16", "fp32"]
LORA_ALPHA_OVER_RANK = 2.0
"""Scale of every adapter: the usual alpha = 2 rank."""


@checked
@frozen
class Lora:
    """Low-rank adapters on every linear layer; the frozen base doubles as the reference."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 32
    base: Literal["bf16", "nf4"] = "bf16"
    """Frozen base of the trainer: BF16, or 4 bit with constants (QLoRA), dequantised in every pass."""


def sequences_of(algorithm: Algorithm) -> int:
    """Sequences of one sample: a pair has two."""
    return 2 if algorithm in PAIRED else 1


@hashed_once
@checked
@frozen
class Workload(Hashed):
    """One RLHF step, independent of hardware and placement."""

    algorithm: Algorithm = "ppo"
    model: str = "8b"
    """The policy: preset, alias or path of a `config.json`."""
    critic: str = "same"
    """Model name or `same` as the policy; read only where the algorithm has a critic."""
    reference: str = "same"
    """Model name, `same`, or `none`; several teachers of distillation with commas between them."""
    reward: Reward = field(default_factory=lambda: Reward(model="same"))
    prompts: Count = USUAL
    """Prompts per step; where none are given those of `usual_batch`."""
    samples: Count = USUAL
    """Responses per prompt (G); likewise."""
    prompt_len: Lengths = field(default_factory=lambda: Fixed(value=1024))
    """Tokens."""
    response_len: Lengths = field(default_factory=lambda: Fixed(value=1024))
    """Tokens."""
    epochs: Annotated[int, Field(ge=1, le=100)] = 1
    """Passes over the batch in one step."""
    mini_batches: Annotated[int, Field(ge=1, le=4096)] = 1
    """Optimizer steps per epoch."""
    packing: bool = True
    """Sequences are packed without padding for forward passes and training."""
    kl: bool = True
    """A KL term needs reference log-probs; without it there is no reference."""
    old_logprobs: OldLogprobs = "recompute"
    """Old log-probs from a forward of the training engine, those of the rollout engine, or those of the only
    training pass itself (`reused`), which are the same numbers without that forward."""
    lora: Lora | None = None
    environment: Environment | None = None
    custom: OwnParts = OwnParts()
    """What the user's own loss, advantages, sampler, filter and logger take."""
    dynamic_sampling: DynamicSampling | None = None
    oversampling: Annotated[float, Field(ge=0, le=16)] = 0.0
    """Further prompts over those of the step; the first groups to finish are trained on, the rest aborted."""
    optimizer: Literal["adam", "adam8bit"] = "adam"
    gradients: GradientSums = "backend"
    """As the training backend keeps and sums them; in BF16 where that is FP32 (Megatron); in FP32 where that
    is BF16 (DeepSpeed)."""
    speculation: Speculation | None = None
    """Speculative decoding that rollout layouts may have; it competes with none."""
    rollout_precision: Literal["bf16", "fp8", "mxfp4", "nvfp4"] = "bf16"
    rollout_bf16_attention: bool = False
    """Attention projections of a quantised rollout stay BF16."""
    rollout_bf16_layers: Annotated[int, Field(ge=0, le=4096)] = 0
    """First and last layers, together, of a quantised rollout that stay BF16."""
    kv_precision: Literal["bf16", "fp8"] = "bf16"
    """KV cache of the rollout."""
    train_precision: Precision = "bf16"
    """Matrix products of training and scoring."""
    teacher_top: Annotated[int, Field(ge=0, le=4096)] = 0
    """Largest logits of the teacher that distillation compares at each token; 0: that of the token drawn."""
    router_replay: bool = False
    """Training sends a token to the experts that the rollout chose (R3, arXiv 2510.11370)."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of drawn lengths."""

    @property
    def trains_draft(self) -> bool:
        """Whether what drafts tokens for the rollout is trained with the policy."""
        return self.generates and self.speculation is not None and self.speculation.trained

    @property
    def one_update(self) -> bool:
        """Whether the policy that is trained is the one that generated, all through the step."""
        return self.epochs == self.mini_batches == 1

    def __post_init__(self) -> None:
        """Fill in the usual batch; check that batch and mini-batches agree, and that a reference is there."""
        for name, usual in usual_batch(self.algorithm).items():
            if getattr(self, name) is USUAL:
                object.__setattr__(self, name, usual)
        if self.algorithm in REFERRED and self.reference == "none":
            raise RlhfsimError(
                "missing-reference",
                f"{self.algorithm} compares with a reference model, it needs a reference",
                help="set reference: same",
            )
        if len(self.references) > 1 and not self.distils:
            raise RlhfsimError(
                "several-references",
                f"{self.algorithm} has one reference, {len(self.references)} are named",
                help="name one, or set algorithm: distillation",
            )
        if self.num_sequences > MAX_SEQUENCES:
            raise RlhfsimError(
                "batch-too-large",
                f"{self.prompts:,} prompts of {self.samples:,} samples make {self.num_sequences:,} sequences",
                help=AT_MOST,
            )
        if self.generates and self.gen_prompts * self.samples > MAX_SEQUENCES:
            raise RlhfsimError(
                "batch-too-large",
                f"{self.gen_prompts:,} prompts of {self.samples:,} samples are generated at a time",
                help=AT_MOST,
            )
        self._check_sandboxes()
        if self.num_sequences % self.mini_batches:
            raise RlhfsimError(
                "uneven-mini-batches",
                f"{self.num_sequences} sequences do not split into {self.mini_batches} mini-batches",
                help="choose mini_batches that divides prompts x samples",
            )
        if self.old_logprobs == "reused" and not self.one_update:
            raise RlhfsimError(
                "reused-log-probs-of-several-updates",
                "old log-probs of the training pass are those of one update, a step has "
                f"{self.epochs * self.mini_batches}",
                help="set old_logprobs: recompute, or epochs: 1 and mini_batches: 1",
            )
        answers = self.environment.answers_total if self.environment else 0.0
        if answers and answers >= stats(self.prompt_len).mean:
            raise RlhfsimError(
                "answers-longer-than-prompt",
                f"answers of {answers:g} tokens are not inside prompts of {stats(self.prompt_len).mean:g}",
                help="prompt_len holds a prompt and all answers: add them to it",
            )
        if self.dynamic_sampling is not None:
            self._check_dynamic_sampling(self.dynamic_sampling)
        if self.oversampling and (not self.generates or self.environment or self.dynamic_sampling):
            raise RlhfsimError(
                "no-oversampling",
                "oversampling needs a rollout, without environment and without dynamic sampling",
                help="leave out one of the two; with dynamic sampling give its gen_prompts",
            )

    def _check_dynamic_sampling(self, sampling: DynamicSampling) -> None:
        what = None
        if not self.generates or self.has_critic or self.samples < 2:
            what, remedy = (
                "groups of samples",
                "use an algorithm of groups (grpo, dapo, ...) or reinforce++, with 2 samples or more",
            )
        elif self.reward.rules is None or self.reward.model is not None:
            what = "rewards by rules alone, a model's are never equal"
            remedy = "set reward: {rules: {}} in a scenario; as an option --rules seconds_per_sample=0.005"
        elif self.environment is not None:
            what, remedy = "a rollout without environment", "leave out one of the two"
        if what is not None:
            raise RlhfsimError("no-dynamic-sampling", f"dynamic sampling needs {what}", help=remedy)
        sampling.check(self.prompts)

    @property
    def title(self) -> str:
        """Name of the algorithm, as people write it: `GRPO`, `Distillation`."""
        name = self.algorithm.replace("_", " ")
        return name.capitalize() if self.distils else name.upper()

    @property
    def num_sequences(self) -> int:
        """Sequences per step: prompts x samples (both sides of a pair count)."""
        return self.prompts * self.samples * (2 if self.paired else 1)

    @property
    def gen_prompts(self) -> int:
        """Prompts that are generated at a time."""
        if self.dynamic_sampling is not None:
            return self.dynamic_sampling.prompts_of(self.prompts)
        return math.ceil(self.prompts * (1 + self.oversampling) - 1e-9)

    @property
    def gen_batches(self) -> float:
        """Generation batches of a mean step, one after the other."""
        sampling = self.dynamic_sampling
        return 1.0 if sampling is None else sampling.expected_batches(self.prompts)

    @property
    def num_rewarded(self) -> float:
        """Sequences that rules score in a mean step, those thrown away included."""
        if self.dynamic_sampling is None:
            return self.num_sequences
        return self.gen_batches * self.gen_prompts * self.samples

    def _check_sandboxes(self) -> None:
        """Refuse a lockstep that holds more sandboxes than there is memory for."""
        if self.environment is not None and self.environment.lockstep and not self.sandboxes_suffice:
            raise RlhfsimError(
                "lockstep-holds-all-sandboxes",
                "in lockstep all sequences of a batch hold sandboxes, for which the fleet lacks memory",
                help="give more fleet_memory, or set lockstep: false",
            )

    @property
    def sandboxes_suffice(self) -> bool:
        """Whether the fleet's memory holds a sandbox for each sequence of a batch at once."""
        most = None if self.environment is None else self.environment.sandboxes
        return most is None or most >= self.gen_prompts * self.samples

    @property
    def rules_first(self) -> bool:
        """Whether every other call waits for rule rewards."""
        return not self.reward.overlapped or self.dynamic_sampling is not None

    @property
    def generates(self) -> bool:
        """Whether the step has a rollout."""
        return self.algorithm in ONLINE

    @property
    def distils(self) -> bool:
        """Whether the policy learns from a teacher's log-probs alone, without reward or ratio."""
        return self.algorithm == "distillation"

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the models that share the samples of the reference role."""
        return tuple(name.strip() for name in self.reference.split(","))

    @property
    def paired(self) -> bool:
        """Whether it learns from pairs."""
        return self.algorithm in PAIRED

    @property
    def together(self) -> int:
        """Sequences that one micro-batch of training holds at least: both sides of a pair."""
        return sequences_of(self.algorithm)

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algorithm == "ppo"

    @property
    def has_reference(self) -> bool:
        """Whether reference log-probs are needed: with a KL term; by DPO, KTO and distillation always."""
        wanted = self.algorithm in REFERRED or (self.kl and self.generates)
        return self.reference != "none" and wanted

    @property
    def base_is_reference(self) -> bool:
        """Whether the frozen base of the adapters can give reference log-probs."""
        return self.lora is not None and self.reference == "same" and self.has_reference

    @property
    def has_reward_model(self) -> bool:
        """Whether a reward model scores samples."""
        return self.generates and not self.distils and self.reward.model is not None
