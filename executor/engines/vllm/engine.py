"""Rollout engine on vLLM: one replica, continuous batching, weights received between steps.

The engine core runs in this process (no queue between `step` and the scheduler), so the weight version of a
token is simply that of the step which sampled it. Requests that run while weights arrive keep their KV cache:
old tokens stay computed with old weights, new tokens see the new ones (partial rollouts, AReaL, arXiv
2505.24298). The responses of one prompt share its prefill through vLLM's prefix cache; the weight version is
the salt of its hashes, so that no request finds KV of other weights than those it was added under.

Log-probs are those of softmax(logits / temperature) over the whole vocabulary, as the trainer computes them,
also where top_p < 1 narrows what is sampled. Greedy requests (temperature 0) report those at temperature 1.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from executor.engines.protocols import Link, RolloutSpec
from executor.engines.vllm import start as vllm_start
from executor.samples import Completion, Finish, GenerationRequest, Transfer
from rlhfsim.errors import RlhfsimError

log = logging.getLogger(__name__)

RPC_SLACK_S = 30.0
"""A worker's own time limit ends first, so that its words reach the person."""
POLL_S = 0.01
"""Between two looks at a stage."""


class VllmEngine:
    """A `RolloutEngine`. Close it: worker processes of tp > 1 do not end by themselves."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        self.version = spec.version
        """Version of the loaded weights; 0: those of the model folder."""
        self._changes: dict[int, list[tuple[int, int]]] = {}
        self._requests: dict[int, GenerationRequest] = {}
        self._limit_s = RPC_SLACK_S
        """Time limit of a receive."""
        self._staging: int | None = None
        """Version that is staged."""
        self._asleep: set[str] = set()
        self._broken: RlhfsimError | None = None
        self._lock = threading.RLock()
        """One call at a time reaches the workers: `staged` is asked from outside the stepping thread."""
        self._device = vllm_start.ready(spec)
        from executor.engines.vllm import api as vllm_api

        vllm_api.check_version()
        if self._device == "cpu":
            vllm_api.wait_asleep()
        self._api: Any = vllm_api
        self._stops = vllm_start.stop_tokens(spec.model)
        self._llm: Any = vllm_start.start(spec, self._device)
        self._rpc("rlhf_prepare")

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._check()
        for request in requests:
            self._validate(request)
            self._requests[request.id] = request
            self._changes[request.id] = [(0, self.version)]
            prompt = {"prompt_token_ids": request.prompt.tolist(), "cache_salt": str(self.version)}
            self._llm.llm_engine.add_request(str(request.id), prompt, self._sampling(request))

    def step(self) -> list[Completion]:
        """One scheduler step; the completions that ended in it."""
        self._check()
        with self._lock:
            outputs = self._llm.llm_engine.step()
        return [self._completion(output) for output in outputs if output.finished]

    @property
    def unfinished(self) -> int:
        """Requests that are queued or running."""
        return len(self._requests)

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        """Stop those of these requests that are unfinished here; what there is of each."""
        so_far = self._api.sampled_so_far(self._llm)
        here = [id for id in ids if id in self._requests]
        self._llm.llm_engine.abort_request([str(id) for id in here])
        return [
            self._response(id, tokens, logprobs, "length")
            for id in here
            for tokens, logprobs in [so_far[str(id)]]
        ]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions of the requests in their order; for checks and tests (nothing else may run)."""
        assert not self._requests, "other requests are running"
        self.add(requests)
        done: dict[int, Completion] = {}
        while self._requests:
            done |= {completion.id: completion for completion in self.step()}
        return [done[request.id] for request in requests]

    def connect(self, links: Sequence[Link]) -> None:
        """Prepare to receive: the link of each worker, in their order; the last ones count."""
        self._limit_s = links[0].channel.timeout_s + RPC_SLACK_S
        self._rpc("rlhf_connect", list(links))

    def receive(self, version: int) -> Transfer:
        """Load weights as they arrive; running requests keep their KV cache and go on with the new ones."""
        self._check()
        self._wake("weights")
        transfer = self._loaded("rlhf_receive", version)
        self._changed(version)
        return transfer

    def stage(self, version: int) -> None:
        """Receive into host memory from a thread of each worker; returns at once."""
        self._check()
        assert self._staging is None, "a stage is under way"
        self._staging = version
        self._rpc("rlhf_stage", version)

    def staged(self) -> bool:
        """Whether the stage ended; if it failed, `commit` says why."""
        return self._staging is not None and all(self._rpc("rlhf_staged"))

    def commit(self) -> Transfer:
        """Load what was staged, waiting for it if need be."""
        assert self._staging is not None, "commit without stage"
        version, self._staging = self._staging, None
        self._wake("weights")
        while not all(self._rpc("rlhf_staged")):  # each worker reads what the others kept
            time.sleep(POLL_S)
        try:
            transfer = self._loaded("rlhf_commit")
        finally:
            self._rpc("rlhf_unstage")
        self._changed(version)
        return transfer

    def sleep(self, level: int) -> None:
        """0: nothing; 1: weights to host, KV freed; 2: both freed. On CPU vLLM frees nothing."""
        if level == 0 or "weights" in self._asleep:
            return
        assert not self._requests, "requests are running: their KV cache would be lost"
        if self._device == "cpu":
            log.info("sleep level %d: vLLM frees nothing on CPU", level)
        else:
            self._llm.sleep(level=level)
        self._asleep = {"weights", "kv_cache"}

    def release_kv_cache(self) -> None:
        """Free the KV cache; weights stay. The scheduler pauses until it is back (`wake`)."""
        if self._asleep:
            return
        assert not self._requests, "requests are running: their KV cache would be lost"
        if self._device == "cuda":
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()
        self._asleep = {"kv_cache"}

    def wake(self, *, kv_cache: bool = True) -> None:
        """Undo sleep, without `kv_cache` of the weights alone; after level 2 they must be received again."""
        self._wake("weights", *(("kv_cache",) if kv_cache else ()))

    def forget_peaks(self) -> None:
        """Peaks of memory begin again."""
        self._rpc("rlhf_forget_peaks")

    def memory(self) -> Mapping[str, float]:
        """Bytes of the worker whose GPU is fullest; `host` of all workers."""
        workers: list[dict[str, float]] = self._rpc("rlhf_memory")
        fullest = max(workers, key=lambda worker: worker["device_peak"])
        hosts = {key: sum(worker[key] for worker in workers) for key in ("host", "host_peak")}
        asleep = "kv_cache" in self._asleep and self._device == "cuda"
        return fullest | hosts | ({"kv": 0.0} if asleep else {})

    def close(self) -> None:
        """Shut the engine down with all its processes."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        try:
            llm.collective_rpc("rlhf_close", timeout=RPC_SLACK_S)
        except Exception as error:  # a dead worker must not keep the others alive
            log.warning("closing channels failed: %s", error)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()

    def _loaded(self, method: str, *args: Any) -> Transfer:
        """What all workers received; after a load that failed half-way the engine cannot go on."""
        try:
            results: list[Transfer | RlhfsimError] = self._rpc(method, *args, timeout=self._limit_s)
        except TimeoutError as error:
            self._broken = RlhfsimError(
                "weight-sync-timeout", f"a rollout worker did not answer in {self._limit_s:g} s"
            )
            raise self._broken from error
        failed = next((result for result in results if isinstance(result, RlhfsimError)), None)
        if failed is not None:
            self._broken = None if all(self._rpc("rlhf_intact")) else failed
            raise failed
        transfers = [result for result in results if isinstance(result, Transfer)]
        assert len({transfer.checksum for transfer in transfers}) == 1
        return max(transfers, key=lambda transfer: transfer.seconds)

    def _changed(self, version: int) -> None:
        """Tokens from here on are of this version."""
        self.version = version
        for name, (tokens, _) in self._api.sampled_so_far(self._llm).items():
            self._changes[int(name)].append((len(tokens), version))

    def _completion(self, output: Any) -> Completion:
        result = output.outputs[0]
        finish: Finish = "stop" if result.finish_reason == "stop" else "length"
        return self._response(int(output.request_id), result.token_ids, result.logprobs.logprobs, finish)

    def _response(
        self, id: int, tokens: Sequence[int], logprobs: Sequence[float], finish: Finish
    ) -> Completion:
        """What was sampled of a request that leaves; `logprobs` of the sampled tokens alone."""
        del self._requests[id]
        versions = np.empty(len(tokens), dtype=np.int32)
        for start, version in self._changes.pop(id):
            versions[start:] = version
        return Completion(
            id=id,
            tokens=np.asarray(tokens, dtype=np.int64),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=versions,
            finish=finish,
        )

    def _sampling(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed if request.temperature > 0 else None,
            max_tokens=request.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=self._stops,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _validate(self, request: GenerationRequest) -> None:
        if request.id in self._requests:
            raise RlhfsimError("duplicate-request", f"request {request.id} is already running")
        length = len(request.prompt) + request.max_tokens
        if not len(request.prompt) or length > self.spec.max_model_len:
            raise RlhfsimError(
                "request-too-long",
                f"request {request.id}: {len(request.prompt)} prompt and {request.max_tokens} response "
                f"tokens, max_model_len is {self.spec.max_model_len}",
                help="shorten or drop the prompt, or lower sampling.max_tokens",
            )

    def _wake(self, *tags: str) -> None:
        """Wake some parts: weights can arrive before the KV cache needs its memory."""
        tags = tuple(tag for tag in tags if tag in self._asleep)
        if tags and self._device == "cuda":
            self._llm.wake_up(tags=list(tags))
        self._asleep -= set(tags)

    def _check(self) -> None:
        assert self._llm is not None, "the engine is closed"
        if self._broken is not None:
            raise RlhfsimError(
                "engine-broken",
                f"a weight load failed half-way: {self._broken.message}",
                help="close this engine and start a new one",
            )

    def _rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        assert self._llm is not None, "the engine is closed"
        with self._lock:
            results: list[Any] = self._llm.collective_rpc(method, timeout=timeout, args=args)
        return results
