"""All that is vLLM-internal, in one place: known versions, the reload of weights, the sampler's log-probs.

Only worker processes and `executor.engines.vllm.engine` import this.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.machine.facts import libraries
from rlhfsim.errors import RlhfsimError

KNOWN = ((0, 29), (0, 34))
"""First known release and first unknown one; vLLM changes the reload module without notice."""
LOOK_S = 0.0005
"""Between two looks for a message."""


def check_version() -> str:
    """The installed version; an error when it is not a known one."""
    installed = _installed()
    parts = tuple(int(part) for part in installed.split("+")[0].split(".")[:2])
    if not KNOWN[0] <= parts < KNOWN[1]:
        low, high = (".".join(map(str, edge)) for edge in KNOWN)
        raise RlhfsimError(
            "vllm-version",
            f"vLLM {installed} is installed; known are versions from {low} up to, without, {high}",
            help="install the version of requirements/cpu.lock (CPU) or of the extra real-gpu",
        )
    return installed


def _installed() -> str:
    if not (version := libraries("vllm").get("vllm")):
        raise RlhfsimError(
            "vllm-version",
            "vLLM is not installed",
            help="install requirements/cpu.lock (CPU) or the extra real-gpu",
        )
    return version


def wait_asleep() -> None:
    """From now on a process that waits for a message of another one of its replica sleeps between two looks.

    vLLM's readers look all the time for a second, which is quicker where GPUs compute; on CPUs they take the
    cores of those that they wait for. Their notifications alone are not enough: some are lost, for 5 s each.
    """
    queues: Any = import_module("vllm.distributed.device_communicators.shm_broadcast")
    queues.sched_yield = partial(time.sleep, LOOK_S)


class Reload:
    """One load of weights in Hugging Face form into a running model, some at a time.

    A bare `model.load_weights` fails on CPU, where linear weights are re-packed and their parameters emptied,
    and does not quantise again on GPU; the layerwise reload rebuilds each layer. vLLM's own transfer engines
    do the same around an update. Nothing is touched before the first tensor is here.
    """

    def __init__(self, worker: Any, *, whole: bool) -> None:
        self._worker = worker
        self._whole = whole
        """Every layer must come."""
        self._model = worker.model_runner.get_model()
        self._begun = False

    @torch.no_grad()
    def load(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Some weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self._worker.vllm_config):
            if weights and not self._begun:
                self._worker.rlhf_whole, self._begun = False, True
                _unpack_experts(self._model)
                initialize_layerwise_reload(self._model)
            self._model.load_weights(iter(weights))

    @torch.no_grad()
    def finish(self) -> None:
        """The model is whole again.

        Raises:
            RlhfsimError: weights are missing.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._begun:
            raise RlhfsimError("weight-sync-incomplete", "the transfer held no weights")
        with set_current_vllm_config(self._worker.vllm_config):
            _check_loaded(self._model, self._whole)
            finalize_layerwise_reload(self._model, self._worker.model_config)  # type: ignore[no-untyped-call]
        _repack_head(self._model)
        self._worker.rlhf_whole = True


def _check_loaded(model: torch.nn.Module, whole: bool) -> None:
    """Refuse a load that left layers out or half filled; vLLM only warns, or keeps uninitialised memory."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        wanted = info.load_numel_total or 0
        # embeddings are padded to a multiple of 64 rows, and a tied head has no weights of its own; rotary
        # caches and attention scales are in no checkpoint
        plain = not isinstance(layer, VocabParallelEmbedding) and list(layer.parameters(recurse=False))
        if not info.can_load() or not plain or is_deferred_attention_layer(layer):
            continue
        if 0 < info.load_numel < wanted or (whole and wanted and info.load_numel == 0):
            missing.append(name)
    if missing:
        raise RlhfsimError(
            "weight-sync-incomplete",
            f"the transfer left {len(missing)} layers without all of their weights, first {missing[0]!r}",
            help="send every weight of the model by its Hugging Face name",
        )


def _unpack_experts(model: torch.nn.Module) -> None:
    """Have experts packed again on CPU: their kernel packs when it is built, and is kept over a reload."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None  # type: ignore[union-attr]


def _repack_head(model: torch.nn.Module) -> None:
    """Rebuild the packed copy of a tied head, which the reload leaves with the old weights on CPU."""
    head, method = getattr(model, "lm_head", None), None
    if head is not None and next(head.parameters(), torch.empty(0)).device.type == "cpu":
        method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)


def use_full_logprobs(worker: Any) -> None:
    """Report log-probs of the whole temperature-scaled distribution also where top-p cuts it.

    vLLM's `processed_logprobs` are renormalised inside the nucleus. The trainer's are not, and their ratio
    would then be wrong by the nucleus' mass. Log-probs are therefore taken before the cut, which may work in
    place: of a copy in model runner V2 (GPUs), which computes log-probs from the logits that sampling
    returns, and computed here in V1 (CPUs).
    """
    sampler = getattr(worker.model_runner, "sampler", None)
    if sampler is None:  # a pipeline stage without the head
        return
    if hasattr(sampler, "_sample_random"):
        _keep_logits(sampler)
    else:
        _keep_logprobs(sampler.topk_topp_sampler)


def _keep_logits(sampler: Any) -> None:
    """Makes model runner V2 sample from a copy and return the logits as they were, (B, V)."""
    inner = sampler._sample_random
    signature = inspect.signature(inner)
    if not {"processed_logits", "top_k", "top_p"} <= signature.parameters.keys():
        raise RlhfsimError("vllm-version", f"vLLM {_installed()} samples otherwise: {signature}")

    def sample(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        given = signature.bind(*args, **options)
        logits: Tensor = given.arguments["processed_logits"]
        if given.arguments["top_k"] is not None or given.arguments["top_p"] is not None:
            given.arguments["processed_logits"] = logits.clone()
        return inner(*given.args, **given.kwargs)[0], logits

    sampler._sample_random = sample


def _keep_logprobs(cut: Any) -> None:
    """Makes model runner V1 take log-probs before the cut."""
    inner = cut.forward

    def forward(
        logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if k is None and p is None:
            sampled, logprobs = inner(logits, generators, k, p)
            return sampled, logprobs
        full = logits.log_softmax(dim=-1, dtype=torch.float32)
        sampled, _ = inner(logits, generators, k, p)
        return sampled, full

    cut.forward = forward


def unlink_shared_memory() -> None:
    """Unlink the buffers of vLLM's CPU all-reduce, which outlive even an orderly shutdown."""
    ident = os.environ.get("VLLM_DIST_IDENT", "")
    for path in Path("/dev/shm").glob(f"*{ident}-*") if ident else ():  # with or without `vllm_dist_`
        path.unlink(missing_ok=True)


def sampled_so_far(llm: Any) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """Response tokens of every unfinished request and their log-probs, by the id it was added under."""
    states = llm.llm_engine.output_processor.request_states.values()
    return {
        getattr(state, "external_req_id", None) or state.request_id: (
            state.detokenizer.output_token_ids,
            state.logprobs_processor.logprobs.logprobs,
        )
        for state in states
    }


def kv_tensors(worker: Any) -> list[Tensor]:
    """The KV cache's tensors."""
    tensors: list[Tensor] = []
    for entry in getattr(worker.model_runner, "kv_caches", []):
        tensors += [entry] if isinstance(entry, Tensor) else [t for t in entry if t is not None]
    return tensors
