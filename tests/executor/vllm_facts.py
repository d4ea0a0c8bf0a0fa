"""Runs a real vLLM engine through everything that `test_vllm.py` asserts, in a process of its own.

vLLM changes its process for good (threads, distributed state), and only from outside can one see what it
leaves
behind. Usage: python vllm_facts.py FOLDER; facts are written to FOLDER/facts.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from vllm_rig import MAX_LEN, channel, disagreement, engine_at, model_at, perturb, requests, sync, weights_of

from executor.engines.vllm.engine import VllmEngine
from executor.environments.conversations import Conversations
from executor.samples import Completion, GenerationRequest
from executor.tasks import tiny
from executor.weight_transfer import shared_memory
from executor.weight_transfer.channel import Sender
from executor.weight_transfer.packing import GatheredWeights
from rlhfsim.errors import RlhfsimError

TRANSPORTS = ("broadcast", "ipc", "host", "disk")


def after_sync(
    engine: VllmEngine, model: Any, transport: str, folder: Path, times: int = 2
) -> dict[str, Any]:
    """Disagreement before and after each of some syncs over one channel."""
    sender = Sender(channel(engine, transport, folder))
    facts: dict[str, Any] = {"stale": [], "synced": [], "seconds": []}
    for _ in range(times):
        version = engine.version + 1
        perturb(model, version)
        facts["stale"].append(disagreement(model, requests(4), engine.generate(requests(4))))
        facts["seconds"].append(sync(engine, sender, weights_of(model), version).seconds)
        got = engine.generate(requests())
        facts["synced"].append(disagreement(model, requests(), got))
        facts["versions"] = sorted({int(v) for c in got for v in c.versions})
        facts["expected_versions"] = [version]
    sender.close()
    return facts


def sampling(engine: VllmEngine, model: Any) -> dict[str, Any]:
    """Seeds, greedy, nucleus, finish reasons."""
    plain = requests(temperature=1.0, top_p=1.0)
    first, again = engine.generate(plain), engine.generate(plain)
    same_prompt = [GenerationRequest(id=i, prompt=plain[0].prompt, max_tokens=16, seed=i) for i in range(6)]
    twins = engine.generate(same_prompt)
    greedy = requests(3, temperature=0.0)
    long = [
        GenerationRequest(id=i, prompt=plain[0].prompt, max_tokens=(8, 200)[i % 2], temperature=1.5, seed=i)
        for i in range(24)
    ]
    ended = engine.generate(long)
    eos = tiny.VOCABULARY.index(tiny.EOS)
    return {
        "initial": disagreement(model, requests(), engine.generate(requests())),
        "repeats": all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True)),
        "distinct": len({tuple(c.tokens.tolist()) for c in twins}),
        "greedy": greedy_is_argmax(model, greedy, engine.generate(greedy)),
        "ended": {c.finish for c in ended} == {"stop", "length"},
        "eos_included": all((c.tokens[-1] == eos) == (c.finish == "stop") for c in ended),
        "eos_inside": any(eos in c.tokens[:-1] for c in ended),
        "lengths": all(
            len(c.tokens) == r.max_tokens for r, c in zip(long, ended, strict=True) if c.finish == "length"
        ),
    }


@torch.no_grad()
def greedy_is_argmax(model: Any, asked: Sequence[GenerationRequest], got: Sequence[Completion]) -> bool:
    for request, completion in zip(asked, got, strict=True):
        ids = torch.tensor(np.concatenate([request.prompt, completion.tokens]))[None]
        best = model(ids).logits[0, len(request.prompt) - 1 : -1].argmax(-1)
        if not torch.equal(best, ids[0, len(request.prompt) :]):
            return False
    return True


def partial(engine: VllmEngine, model: Any, folder: Path) -> dict[str, Any]:
    """An update while requests run; compared with a forward that switches weights at the same token."""
    import copy

    sender = Sender(channel(engine, "broadcast", folder))
    asked = requests(6, max_tokens=20, temperature=1.0, top_p=1.0)
    old, before = copy.deepcopy(model), engine.version
    engine.add(asked[:4])
    done = [c for _ in range(8) for c in engine.step()]
    engine.add(asked[4:])  # these are still queued
    perturb(model, 77)
    sync(engine, sender, weights_of(model), before + 1)
    while engine.unfinished:
        done += engine.step()
    sender.close()
    by_id = {c.id: c for c in done}
    got = [by_id[request.id] for request in asked]
    switches = [int((c.versions == before).sum()) for c in got]
    return {
        "switches": switches,
        "lengths": [len(c.tokens) for c in got],
        "monotone": all(bool((np.diff(c.versions) >= 0).all()) for c in got),
        "disagreement": max(
            switched(old, model, request, c, n) for request, c, n in zip(asked, got, switches, strict=True)
        ),
        "ignoring_the_switch": disagreement(model, asked[:4], got[:4]),
    }


@torch.no_grad()
def switched(old: Any, new: Any, request: GenerationRequest, got: Completion, count: int) -> float:
    """Disagreement with a forward whose KV cache of all but the last of `count` old tokens is old."""
    ids = torch.tensor(np.concatenate([request.prompt, got.tokens]))[None]
    start = len(request.prompt)
    known = start + count - 1
    if count == 0:
        logits = new(ids).logits[0]
    elif count == len(got.tokens):
        logits = old(ids).logits[0]
    else:
        past = old(ids[:, :known], use_cache=True)
        rest = new(ids[:, known:], past_key_values=past.past_key_values, use_cache=True)
        logits = torch.cat([past.logits[0], rest.logits[0]])
    ours = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
    return float((ours - torch.tensor(got.logprobs)).abs().max())


def prefix(engine: VllmEngine, model: Any, folder: Path) -> dict[str, Any]:
    """Prompt tokens that three responses of one prompt took from the cache, before and after a sync."""
    prompt = np.random.default_rng(3).integers(4, 60, 150)
    asked = [GenerationRequest(id=i, prompt=prompt, max_tokens=8, seed=i) for i in range(3)]
    core, cached = engine._llm.llm_engine, dict[str, int]()

    def step() -> list[Any]:
        outputs = inner()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    inner, core.step = core.step, step
    engine.generate(asked)
    first = [cached[str(i)] for i in range(3)]
    sender = Sender(channel(engine, "broadcast", folder))
    perturb(model, 66)
    sync(engine, sender, weights_of(model), engine.version + 1)
    sender.close()
    got = engine.generate(asked)
    core.step = inner
    return {
        "first": first,
        "synced": [cached[str(i)] for i in range(3)],
        "disagreement": disagreement(model, asked, got),
    }


def overlapped(engine: VllmEngine, model: Any, folder: Path) -> dict[str, Any]:
    """Weights are staged beside running steps and loaded between two of them."""
    sender = Sender(channel(engine, "ipc", folder))
    perturb(model, 88)
    before = engine.version
    asked = requests(8, max_tokens=200, temperature=1.5, top_p=1.0)
    engine.add(asked)
    with ThreadPoolExecutor(1) as pool:
        slow = GatheredWeights(lambda: weights_of(model, pause_s=0.004))
        sent = pool.submit(sender.send, slow, before + 1)
        engine.stage(before + 1)
        done, steps = [], 0
        while not engine.staged() and engine.unfinished:
            done += engine.step()
            steps += 1
        running = engine.unfinished
        while not engine.staged():
            time.sleep(0.01)
        staged = [path.stat().st_size for path in shared_memory.SHARED.glob("rlhfsim-*staged*.weights")]
        transfer = engine.commit()
        equal = sent.result(30).checksum == transfer.checksum
    while engine.unfinished:
        done += engine.step()
    sender.close()
    got = engine.generate(requests())
    return {
        "steps_while_staging": steps,
        "staged_bytes": staged,
        "model_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "running_at_commit": running,
        "checksums_equal": equal,
        "both_versions": any(len(set(c.versions.tolist())) == 2 for c in done),
        "finite": all(bool(np.isfinite(c.logprobs).all()) for c in done),
        "synced": disagreement(model, requests(), got),
    }


def adapters(engine: VllmEngine, model: Any, base: Path, folder: Path) -> dict[str, Any]:
    """Only LoRA matrices travel; the model's other weights must equal the base's."""
    spec = channel(engine, "broadcast", folder, adapters_only=True, base_model=str(base), lora_scale=2.0)
    sender = Sender(spec)
    sent, draw = [], torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "down_proj.weight" in name:
                a = 0.1 * torch.randn(4, weight.shape[1], generator=draw)
                b = 0.1 * torch.randn(weight.shape[0], 4, generator=draw)
                weight.add_(2.0 * b @ a)
                sent += [(f"{name}.lora_A", a), (f"{name}.lora_B", b)]
    stale = disagreement(model, requests(4), engine.generate(requests(4)))
    transfer = sync(engine, sender, iter([sent]), engine.version + 1)
    sender.close()
    return {
        "stale": stale,
        "synced": disagreement(model, requests(), engine.generate(requests())),
        "bytes": transfer.bytes,
    }


def failures(engine: VllmEngine, model: Any, folder: Path) -> dict[str, Any]:
    """Errors by code; the engine survives those that come before the first byte."""
    facts: dict[str, Any] = {}
    channel(engine, "broadcast", folder, timeout_s=0.5)
    facts["absent"] = code_of(lambda: engine.receive(9))
    facts["survives"] = disagreement(model, requests(3), engine.generate(requests(3)))
    facts["too_long"] = code_of(lambda: engine.add(requests(1, max_tokens=MAX_LEN)))
    facts["aborted"] = [c.id for c in (engine.add(requests(3)), engine.step(), engine.abort([0, 1, 2]))[2]]
    facts["unfinished"] = engine.unfinished
    facts["moved"] = moved(engine, model)
    sender = Sender(channel(engine, "host", folder))
    short = [[named for bucket in weights_of(model) for named in bucket if "k_proj" not in named[0]]]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, GatheredWeights(lambda: iter(short)), 99)
        facts["incomplete"] = code_of(lambda: engine.receive(99))
        sent.exception(30)
    sender.close()
    facts["broken"] = code_of(lambda: engine.generate(requests(1)))
    return facts


def moved(engine: VllmEngine, model: Any) -> dict[str, Any]:
    """Responses that leave twice and go on, behind what there is of them, and the model's log-probs of them."""
    asked, begun = requests(temperature=1.0, top_p=1.0), list[int]()
    waiting: Sequence[GenerationRequest] = asked
    done: list[Completion] = []
    for steps in (3, 4):
        one = Conversations(engine)
        one.add(waiting)
        done += [c for _ in range(steps) for c in one.step()]
        waiting = one.leave()
        begun += [len(r.begun.tokens) for r in waiting if r.begun is not None]
    last = Conversations(engine)
    last.add(waiting)
    while last.unfinished:
        done += last.step()
    done.sort(key=lambda c: c.id)
    lengths = [(len(c.tokens), r.max_tokens, c.finish) for r, c in zip(asked, done, strict=True)]
    return {
        "begun": begun,
        "disagreement": disagreement(model, asked, done),
        "lengths": all(n == most if finish == "length" else n <= most for n, most, finish in lengths),
        "versions": sorted({int(v) for c in done for v in c.versions}) == [engine.version],
    }


def code_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RlhfsimError as error:
        return error.code
    return "none"


def footprint() -> dict[str, Any]:
    """Processes begun since this one: its own children, and what the fork server that made it made for it."""
    own = psutil.Process()
    family = psutil.Process(own.ppid()).children(recursive=True)
    children = [p for p in family if p != own and p.create_time() >= own.create_time()]
    return {
        "shared": sorted(os.listdir("/dev/shm")),
        "children": [p.name() for p in children if p.status() != psutil.STATUS_ZOMBIE],
    }


def main(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"before": footprint()}
    clock: dict[str, float] = {}
    start = time.monotonic()

    def lap(name: str) -> None:
        nonlocal start
        clock[name], start = time.monotonic() - start, time.monotonic()

    base = tiny.build(folder / "qwen2")
    model, engine = model_at(base), engine_at(base)
    lap("start")
    facts["sampling"] = sampling(engine, model)
    facts["adapters"] = adapters(engine, model, base, folder)
    facts["transports"] = {t: after_sync(engine, model, t, folder) for t in TRANSPORTS}
    lap("transports")
    facts["partial"] = partial(engine, model, folder)
    facts["prefix"] = prefix(engine, model, folder)
    facts["overlapped"] = overlapped(engine, model, folder)
    lap("partial, overlapped")
    engine.sleep(2)
    engine.wake()
    facts["memory"] = dict(engine.memory())
    facts["failures"] = failures(engine, model, folder)
    engine.close()
    lap("failures")
    facts["families"] = {}
    for family, tied in (("llama", True), ("qwen3", True)):
        base = tiny.build(folder / family, family=family, tied=tied)
        model, engine = model_at(base), engine_at(base)
        facts["families"][family] = after_sync(engine, model, "broadcast", folder)
        engine.close()
    lap("families")
    facts["closed"] = footprint()
    engine = engine_at(folder / "qwen2", tp=2)
    model = model_at(folder / "qwen2")
    facts["tp2_start"] = footprint()
    facts["tp2"] = after_sync(engine, model, "ipc", folder, times=1)
    facts["tp2_overlapped"] = overlapped(engine, model, folder)
    engine.close()
    lap("tp2")
    facts["tp2_closed"] = footprint()
    return facts | {"clock": clock}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    (root / "facts.json").write_text(json.dumps(main(root), indent=1))
