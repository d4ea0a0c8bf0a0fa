"""How a run learns: what a plan does not say. Read from run.yaml; every field has a default that works.

The plan says where, how large and in which order; the settings say on which data, with which rewards, loss
constants and learning rates, and for how long.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, dataclass_transform

from pydantic import BeforeValidator, Field

from rlhfsim.frozen import T, frozen
from rlhfsim.specs.loading import checked
from rlhfsim.specs.workload.workload import PolicyLoss

Precision = Literal["fp32", "bf16"]
Answers = Literal["unused", "read", "required"]
"""Whether rewards use the answers of the data: not at all; where there are some; every row must have one."""
OnError = Literal["stop", "zero", "drop"]
"""What happens to a sample without a value: the run ends, it counts as 0, or it is left out."""
Say = Callable[[str], None]
"""Who is told in words what happens."""
MOST = 1e6
"""Larger constants are slips."""
Weight = Annotated[float, Field(ge=-MOST, le=MOST)]
Positive = Annotated[float, Field(gt=0, le=MOST)]
NonNegative = Annotated[float, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(ge=1e-3, le=30 * 86_400)]
"""Length of a wait: a millisecond to 30 days."""
Temperature = Annotated[float, Field(ge=0.01, le=100)]
"""vLLM samples with 0.01 where less is asked for, which the log-probs of training would not know."""
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Times = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=10**9, strict=True)]
"""In a model's config.json, where Transformers takes no text for a number."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(cls: type[T]) -> type[T]:
    """A part of run.yaml: a frozen value whose fields are checked where it is read."""
    return checked(frozen(cls))


def _none_where_empty(value: Any) -> Any:
    """Settings that older runs wrote have {} here."""
    return value or None


@section
class Data:
    """Prompts."""

    task: Literal["arithmetic", "comparison", "logic", "guess", "file"] | None = None
    """None: `file` with a path, else arithmetic."""
    path: str | None = None
    """A file (JSONL, JSON, Parquet, CSV), a folder of such files or of datasets' save_to_disk,
    OWNER/NAME on the Hugging Face hub, or `module:function` that yields a dict a row; task `file`."""
    split: str = "train"
    """Split of a data set that has several."""
    subset: str | None = None
    """Subset of a data set on the hub that has several."""
    prompt_column: str | None = None
    """Columns that are named must be there. None: `prompt`, else another usual name."""
    answer_column: str | None = None
    """None: `answer`, else another usual name, where rewards use answers."""
    chosen_column: str | None = None
    """DPO and reward models; None: `chosen`, else another usual name."""
    rejected_column: str | None = None
    """DPO and reward models; None: `rejected`, else another usual name."""
    label_column: str | None = None
    """KTO: true, 1 or positive is desirable; None: `label`, else another usual name."""
    chat_template: bool = False
    """Prompts are turns of a user, or lists of `role` and `content`, and pass the model's chat template."""
    max_prompt_tokens: Count | None = None
    """Longest prompt of a file; None: what the model's positions leave for one next to a response."""
    on_long: Literal["drop", "truncate", "refuse"] = "drop"
    """What happens to longer ones: left out; cut at their beginning; the run does not start."""
    difficulty: Annotated[int, Field(ge=1, le=9)] = 1
    """Difficulty of generated tasks: digits of a number, or statements of a puzzle."""
    shuffle: bool = True
    on_bad_row: Literal["stop", "drop"] = "stop"
    """What happens to a row that cannot be used: the run does not start; it is left out, and counted."""
    held_out: Share | None = None
    """Share of the different prompts, held out of training for evaluation; None: 0.1 of a file, 0.2 of
    generated tasks."""


@section
class Judge:
    """A model behind an OpenAI-compatible HTTP interface that scores responses."""

    url: str
    """Up to `/v1`, as `http://judge:8000/v1`."""
    model: str
    prompt: str
    """What it is asked; {prompt}, {response} and {answer} are filled in."""
    system: str | None = None
    """The system turn before it."""
    pattern: str = r"(?i)score\W{0,9}(-?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression whose first group is the score; the last match counts."""
    json_key: str | None = None
    """The score is under this key of a JSON object in the reply; instead of `pattern`."""
    range: tuple[Weight, Weight] = (0.0, 10.0)
    """Lowest and highest score, 0 and 1 of the reward; a score outside is an error."""
    temperature: NonNegative = 0.0
    max_tokens: Count = 512
    """Most tokens of a reply."""
    concurrency: Count = 16
    """Requests at once."""
    key_variable: str | None = None
    """Environment variable of launch with the API key, which is neither stored nor shown."""
    cache: bool = True
    """Keep replies in the user's cache folder: the same request is not asked twice."""

    def __post_init__(self) -> None:
        """Refuse what is no HTTP address, and an empty range."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} does not begin with http:// or https://")
        try:
            address = urllib.parse.urlsplit(self.url)
            reached = address.hostname and address.port != 0
        except ValueError as error:
            raise ValueError(f"url {self.url!r} is no address: {error}") from None
        if not reached:
            raise ValueError(f"url {self.url!r} names no host, or port 0")
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range {self.range} has no room between its ends")


@section
class RewardRule:
    """One rule; rewards are summed by weight."""

    kind: Literal["answer", "math", "format", "code", "function", "judge", "digits"]
    """answer: matches the expected answer; math: also as an expression, by math-verify (optional); format:
    matches `pattern`; code: passes the tests of the problem in a sandbox; function: `target`; judge: the
    score of a remote model; digits: share of digits in the response (for tests)."""
    weight: Weight = 1.0
    pattern: str | None = None
    """Regular expression of `format`."""
    target: str | None = None
    """`module:function` of `function`: called with (prompt, response, answer, meta), returns a number; answer
    is None where the data have none."""
    judge: Judge | None = None
    """Settings of `judge`."""
    timeout_s: Seconds | None = None
    """Wall-clock limit of one sample. None: 60 s for a `judge` (one request), 5 s for others."""
    retries: Times | None = None
    """Further tries of a `function` or a `judge` that failed. None: 5 of a judge, else 1."""
    on_error: OnError = "stop"
    """What happens when they failed too: the run stops; the rule gives 0; the sample teaches nothing."""
    memory_bytes: Annotated[float, Field(ge=2**20, le=2**50)] = 256 * 2**20
    """Limit of `code`."""
    modules: tuple[str, ...] = ()
    """Installed packages that `code` may import in addition to the standard library, such as numpy."""

    @property
    def answers(self) -> Answers:
        """Whether it uses the answers of the data."""
        if self.kind in ("answer", "math"):
            return "required"
        if self.judge is not None and "{answer}" in f"{self.judge.prompt}{self.judge.system}":
            return "required"
        return "read" if self.kind == "function" else "unused"

    @property
    def limit_s(self) -> float:
        """Wall-clock limit of one sample."""
        return self.timeout_s or (60.0 if self.kind == "judge" else 5.0)

    @property
    def tries(self) -> int:
        """How often a sample is tried."""
        return 1 + (self.retries if self.retries is not None else 5 if self.kind == "judge" else 1)


@section
class EnvironmentSettings:
    """Who answers between the turns of a response."""

    kind: Annotated[str, Field(pattern=r"^(python|search|guess|[\w.]+:[\w.]+)$")]
    """python: runs programs in the sandbox; search: finds passages in text files; guess: a game with a hidden
    number; or `module:Class` of one's own, see executor/environments/protocol.py."""
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Keyword arguments of its class."""
    turns: Count | None = None
    """Most turns of a response; None: the most of the plan's workload."""
    turn_tokens: Count | None = None
    """Most tokens that the policy samples in a turn; None: what is left of the response."""
    timeout_s: Seconds = 30.0
    """Time limit of one answer."""
    on_error: OnError = "stop"
    """What a time-out, an exception or a wrong answer does: the run stops; the conversation ends with the
    environment's reward 0; the sample teaches nothing."""
    concurrency: Count = 64
    """Answers that a replica's environments work on at a time."""


def _part_of_text(value: Any) -> Any:
    """`module:function` alone is a part without options."""
    return {"target": value} if isinstance(value, str) else value


@section
class CustomPart:
    """A function or class of one's own."""

    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`module:function` or `module:Class`, importable in the working directory."""
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Its keyword arguments."""


Part = Annotated[CustomPart | None, BeforeValidator(_part_of_text)]


@section
class Custom:
    """Parts of the algorithm of one's own: what each gets and returns is in executor/algorithms/custom.py."""

    loss: Part = None
    """The policy's surrogate, in place of `algorithm.policy_loss`."""
    advantages: Part = None
    """In place of the algorithm's."""
    sampler: Part = None
    """Which problems an iteration asks, in place of the shuffled order."""
    filter: Part = None
    """Which scored samples are learned from."""
    logger: Part = None
    """A further place where metrics go."""


@section
class Algorithm:
    """Constants of the loss; papers in executor/algorithms."""

    policy_loss: PolicyLoss | None = None
    """None: as is usual for the algorithm."""
    clip_low: Positive | None = None
    clip_high: Positive | None = None
    """Ratios are clipped to 1 - clip_low and 1 + clip_high. None: as is usual, see
    executor/algorithms/recipes.py."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Most times that a negative advantage counts; None: no dual clip."""
    value_clip: Positive | None = 0.2
    gamma: Share = 1.0
    lam: Share = 0.95
    kl_coefficient: NonNegative = 0.01
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """None: k1 in the reward, k3 in the loss."""
    kl_in: Literal["reward", "loss"] | None = None
    """None: as is usual for the algorithm, see executor/algorithms/recipes.py."""
    entropy_coefficient: NonNegative = 0.0
    entropy_control: Literal["none", "clip_cov", "kl_cov"] = "none"
    """Tokens whose probability rises most with their advantage: a share of them gives no gradient (clip_cov),
    or pays a KL to the old policy (kl_cov)."""
    covariance_share: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Share of the tokens of a micro-batch, at least one."""
    covariance_bounds: tuple[Weight, Weight] = (1.0, 5.0)
    """clip_cov draws among tokens with a covariance between them."""
    covariance_kl: NonNegative = 1.0
    """Coefficient of kl_cov, times |log ratio|."""
    correction: Literal["none", "truncated", "masked"] = "truncated"
    """Importance correction between rollout and training log-probs."""
    correction_cap: Positive = 2.0
    correction_level: Literal["token", "sequence"] = "token"
    """Whether a token is weighted by its own ratio or by that of its whole response."""
    deviation_epsilon: NonNegative = 1e-6
    """Added to the standard deviation of a group's rewards; verl and NeMo-RL 1e-6, TRL 1e-4."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by it, then clipped; penalties follow."""
    reward_clip: Positive | None = 10.0
    length_penalty: NonNegative = 0.0
    """Taken from the reward of the longest possible response, from shorter ones in proportion."""
    overlong_tokens: Count | None = None
    """Last tokens of the longest possible response in which a reward falls by up to overlong_penalty."""
    overlong_penalty: Positive = 1.0
    overlong_filter: bool = False
    """Responses that were cut teach nothing; their rewards still count in their groups."""
    beta: Positive = 0.1
    """DPO and KTO."""
    aggregation: Literal["token", "sequence", "constant"] | None = None
    """How loss terms are averaged: over all tokens; within each response first; over the longest possible
    responses. None: as is usual for the algorithm."""


@section
class Optimizer:
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(ge=1e-12, le=10)] = 1e-5
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Times = 0


@section
class Sampling:
    """How responses are drawn."""

    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Count | None = None
    """Most tokens of a response; None: the largest length of the plan's workload."""


@section
class Checkpoints:
    """When state is saved."""

    every: Times | None = None
    """Iterations between checkpoints; 0: only at the end; None: by time, from failures and its cost."""
    keep: Count = 2
    """Newest ones that stay."""
    best: bool = True
    """The one with the best evaluation stays too, saved when an evaluation finds it; not with every: 0."""
    background: bool | None = None
    """Written from copies in host memory while the next steps run; None: where the engines allow it."""


@section
class Evaluation:
    """How good the model is on held-out problems, before the first and after the last iteration."""

    problems: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Held-out problems; 0: no evaluation."""
    every: Times = 0
    """Iterations between evaluations; 0: only at the ends."""
    data: Data | None = None
    """A data set of its own, all of it unless its `held_out` says so; None: what the run's data hold out."""
    rewards: Annotated[tuple[RewardRule, ...], Field(min_length=1)] | None = None
    """Rules of its own; None: those of the run."""
    samples: Count = 1
    """Responses to a problem; 1: the greedy one; more are sampled, and pass@k is estimated from them."""
    temperature: Temperature = 1.0
    """Sampling temperature where there is more than one response."""


@section
class Tracking:
    """Where metrics go in addition to metrics.jsonl."""

    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_experiment: str | None = None
    samples: Times = 8
    """Samples that are logged as text each time."""
    samples_every: Times = 10
    """Iterations between them; 0: none are."""


@section
class Limits:
    """Waits and retries: nothing waits for ever. None: from the plan's prediction, see executor/limits.py."""

    start_s: Seconds | None = None
    """Until a process is up and its engine built. None: 10 min, and the weights at 200 MB/s."""
    call_s: Seconds | None = None
    """One call of a step. None: 5 times its predicted P90, at least 2 min, at most 4 h."""
    sync_s: Seconds | None = None
    """One weight sync. None: as a call."""
    collective_s: Seconds | None = None
    """One collective of a process group. None: 1 min more than the longest of the others."""
    retries: Times = 2
    """Restarts from the last good state in one run."""


@section
class Settings:
    """Everything of a run that its plan does not say."""

    model: str | None = None
    """Folder of the policy; None: the plan's model path."""
    critic_model: str | None = None
    """Folder; None: the policy's weights with a new head."""
    reward_model: str | None = None
    """Folder with a trained scalar head; None: the policy's."""
    reference_model: str | None = None
    """Folder of the reference, in distillation of the teacher or of several with commas between; None: the
    policy's weights."""
    reward_head: Literal["trained", "drawn"] = "trained"
    """drawn: from the seed where the folder has none, to try the machinery: its rewards are noise."""
    reward_model_weight: Weight = 1.0
    """Weight of the reward model's score next to the rules."""
    data: Data = Data()
    rewards: tuple[RewardRule, ...] | None = None
    """None: kind answer, where the plan has rules and no environment."""
    algorithm: Algorithm = Algorithm()
    custom: Custom = Custom()
    optimizer: Optimizer = Optimizer()
    critic_optimizer: Optimizer | None = None
    """None: as the policy."""
    sampling: Sampling = Sampling()
    iterations: Count = 3
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    precision: Precision | None = None
    """None: fp32 on CPU, bf16 on GPU."""
    bucket_bytes: Count | None = None
    """Bytes of one weight-sync bucket; None: what the planner prices on GPUs, 64 MiB on CPUs."""
    logprob_tolerance: Positive = 0.05
    """Largest mean |log-prob of engine - log-prob of trainer| that the self-check accepts."""
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()
    tracking: Tracking = Tracking()
    limits: Limits = Limits()
    environment: Annotated[EnvironmentSettings | None, BeforeValidator(_none_where_empty)] = None
    """None: a response is one turn. Where the plan's workload has an environment, this is it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Extra environment variables of every worker."""

    @property
    def references(self) -> tuple[str | None, ...]:
        """Folders of the reference, one unless teachers share its samples."""
        named = self.reference_model
        return (None,) if named is None else tuple(folder.strip() for folder in named.split(","))
