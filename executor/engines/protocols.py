"""What an engine must do, whatever library is behind it; coordination knows only these.

Every training and scoring engine is SPMD: one object in each rank's process, all ranks call the same
method in the same order. Ranks of one tensor- or pipeline-parallel group get the same samples, data-parallel
groups different ones; results of data-parallel rank i are those of its own samples, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from executor.samples import Completion, Floats, GenerationRequest, LossSpec, Sample, Transfer
from executor.settings import EnvironmentSettings, Optimizer, Precision
from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.weight_paths import Transport
from rlhfsim.specs.workload.roles import Head
from rlhfsim.specs.workload.workload import GradientSums

if TYPE_CHECKING:
    import torch

"""causal: token log-probs; value: one scalar a token; score: one scalar a sequence, at its last token."""


@frozen
class EngineSpec:
    """How a training or scoring engine is built; the same in all its ranks."""

    role: str
    """actor, critic, reference, reward."""
    model: str
    """Folder with config.json, weights (safetensors) and tokenizer."""
    others: tuple[str, ...] = ()
    """Further models of the role: teachers that share its samples."""
    head: Head = "causal"
    backend: Backend = "deepspeed"
    """Library that shards and trains."""
    layout: Layout
    optimizer: Optimizer | None = None
    """None: the engine only infers."""
    optimizer_kind: Literal["adam", "adam8bit"] = "adam"
    precision: Precision = "fp32"
    gradients: GradientSums = "backend"
    """What DeepSpeed sums the gradients of BF16 weights in: as it does by default (BF16), or FP32."""
    micro_tokens: int | None = None
    """Tokens that the memory of a micro-batch was priced with, padding included; None: as many as
    `layout.micro_batch` of the longest sequences at hand have."""
    score_tokens: int | None = None
    """The same in passes without gradients; None: as `micro_tokens`."""
    packing: bool = False
    """Sequences of a micro-batch are laid end to end without padding, attention block-diagonal."""
    lora_rank: int | None = None
    temperature: float = 1.0
    """Divides logits wherever log-probs are computed, as sampling does."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    seed: int = 0
    """Seed of heads that the checkpoint lacks, and of dropout."""

    @property
    def each(self) -> list[EngineSpec]:
        """The same of every model alone."""
        return [replace(self, model=model, others=()) for model in (self.model, *self.others)]


@frozen
class MiniBatch:
    """What one data-parallel rank contributes to one optimizer step."""

    samples: tuple[Sample, ...]
    global_tokens: int
    """Response tokens of the whole optimizer step, over all data-parallel ranks: the normaliser."""
    global_sequences: int
    """Sequences likewise."""


@frozen
class ChannelSpec:
    """One route for weights from a rank of a trainer group to receivers 0..n-1."""

    name: str
    """Unique among live channels of the run."""
    transport: Transport
    host: str
    """Address of the sender's key-value store (control plane)."""
    port: int
    receivers: int
    """Engine worker processes that this sender serves."""
    folder: str
    """Scratch folder of the run: disk files; shared-memory files are named after it."""
    bucket_bytes: int
    adapters_only: bool = False
    """LoRA: only adapter matrices travel; receivers merge them into the base weights."""
    changes_only: bool = False
    """Only elements that changed since the last transfer travel; both ends remember the rest."""
    base_model: str = ""
    """LoRA: folder of the base weights, readable by the receivers."""
    lora_scale: float = 1.0
    """LoRA: alpha / rank."""
    timeout_s: float = 120.0
    device: Literal["cpu", "cuda"] = "cpu"
    secret: str = field(default_factory=lambda: token_hex(32), repr=False)
    """What both ends know and nobody else (it reaches them by Ray): every message is checked against it."""

    @property
    def native(self) -> Literal["ipc", "nccl"] | None:
        """vLLM's own engine that carries it (between GPUs); None: the executor's transports do."""
        native: dict[Transport, Literal["ipc", "nccl"]] = {"ipc": "ipc", "broadcast": "nccl"}
        own = self.device != "cuda" or self.changes_only
        return None if own else native.get(self.transport)


class Link(NamedTuple):
    """The end of a channel at one engine worker."""

    channel: ChannelSpec
    receiver: int
    """Its number in the channel."""


class ScoringEngine(Protocol):
    """Forward passes of one model."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-prob of every response token, (R,) a sample; head `causal`."""

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Value before every response token, (R,) a sample; head `value`."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Scalar at the last token of every sample; head `score`."""

    def offload(self, folder: Path | None = None, *, weights: bool = True) -> None:
        """Give device memory back: states go to host memory, or to files in `folder` (host memory falls too).

        Without `weights` only what training needs in addition to them (optimizer states, gradients): forward
        passes still work.
        """

    def reload(self, *, states: bool = True) -> None:
        """Undo `offload`; without `states` only of the weights: enough for forward passes."""

    def close(self) -> None:
        """Free everything; the engine cannot be used again."""


class LaterWrites(Protocol):
    """Writes files of a checkpoint when `save` has returned."""

    def fits(self, size: int) -> bool:
        """Whether the host has memory for a copy of so many bytes."""

    def submit(self, job: Callable[[], None]) -> None:
        """Do it later, after those before it."""


class TrainingEngine(ScoringEngine, Protocol):
    """A model that learns."""

    def train(self, batch: MiniBatch, loss: LossSpec) -> Mapping[str, float]:
        """One optimizer step, micro-batch by micro-batch; metrics equal on all ranks."""

    def parts_s(self) -> Mapping[str, float]:
        """Seconds of the steps since they were asked for last, by part, where they can be told apart."""

    def buckets(
        self, bucket_bytes: int, senders: Collection[int] = (0,)
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Full weights by Hugging Face name, gathered layer by layer: a collective over all ranks.

        Ranks in `senders` see tensors, the others empty lists, the same number of buckets everywhere. With
        LoRA the adapters are merged.
        """

    def adapters(self, senders: Collection[int] = (0,)) -> list[tuple[str, torch.Tensor]]:
        """LoRA matrices by name, full, on the ranks in `senders` (others: empty); a collective."""

    def save(self, folder: Path, background: LaterWrites | None = None) -> None:
        """Weights, optimizer, RNG of every rank in a file each, and rank 0's safetensors copy for users.

        `background` writes what it has memory for when this has returned.
        """

    def load(self, folder: Path) -> None:
        """Undo `save`, bit for bit on the same number of ranks; other layouts are refused by name."""


class RolloutEngine(Protocol):
    """Generation with continuous batching. `step` advances all running requests by a token or so."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""

    def step(self) -> list[Completion]:
        """One scheduler step; the completions that ended in it."""

    @property
    def unfinished(self) -> int:
        """Requests that are queued or running."""

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        """Stop those of these requests that are unfinished here; what there is of each."""

    def connect(self, links: Sequence[Link]) -> None:
        """Prepare to receive: the link of each of this engine's workers, in order; the last ones count."""

    def receive(self, version: int) -> Transfer:
        """Load weights as they arrive; running requests keep their KV cache and go on with the new ones."""

    def stage(self, version: int) -> None:
        """Overlapped: receive into host memory from a thread while `step` goes on; returns at once."""

    def staged(self) -> bool:
        """Whether a stage is complete."""

    def commit(self) -> Transfer:
        """Load what was staged."""

    def sleep(self, level: int) -> None:
        """0: nothing; 1: weights to host, KV freed; 2: both freed. Logs where the platform frees nothing."""

    def release_kv_cache(self) -> None:
        """Free the KV cache; weights stay."""

    def wake(self, *, kv_cache: bool = True) -> None:
        """Undo sleep, without `kv_cache` of the weights alone; after level 2 they must be received again."""

    def forget_peaks(self) -> None:
        """Peaks of `memory` are those from here on."""

    def memory(self) -> Mapping[str, float]:
        """Bytes of the fullest GPU by the keys of `engines.memory`, and `kv`."""

    def close(self) -> None:
        """Shut the engine down with all its processes."""


@frozen
class EngineNode:
    """The part of a replica's engine on one of its nodes."""

    nodes: int = 1
    """Nodes of the whole replica; each has as many of its workers."""
    node: int = 0
    """0 leads: it schedules, and the workers of the others do as it says."""
    host: str = ""
    """Where all meet."""
    port: int = 0


@frozen
class RolloutSpec:
    """How one replica of the rollout engine is built."""

    model: str
    layout: RolloutLayout
    max_model_len: int
    """Prompt and response tokens at most."""
    max_num_seqs: int
    kv_bytes: int
    """Bytes of KV cache."""
    precision: Precision = "fp32"
    quantised: bool = False
    """FP8 weights, quantised at weight sync (GPU)."""
    version: int = 0
    """Weight version that lies in `model`."""
    interrupted: bool = False
    """New weights may arrive while requests run."""
    place: EngineNode = EngineNode()
    seed: int = 0
    environment: EnvironmentSettings | None = None
    """Who answers between the turns of a response."""
    turns: int = 1
    """Most of a response."""
    chat: bool = False
    """Its answers pass the chat template."""
    folder: str = ""
    """Where the environment's module is looked for first; empty: the working directory."""
