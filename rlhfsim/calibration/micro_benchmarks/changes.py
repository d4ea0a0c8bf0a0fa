"""Which entries of a profile a session of micro-benchmarks changes, and to what.

Two kinds of machines. Where a shipped profile knows the device, its datasheet stays and efficiencies are
measured against it. A CPU core, or a GPU that no profile knows, has no datasheet: its rates are the best
that was seen, and efficiencies say how much of them is typical. Either way no efficiency passes 1: what
would is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfsim import units
from rlhfsim.calibration.micro_benchmarks.fit import nonnegative, roof_rates
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import SHARES, Profile
from rlhfsim.specs.hardware.measured import WIDENING, Measured, MissingProbe, Session
from rlhfsim.training.gradient_exchange import FP32, STATE_BYTES

LARGE = (64.0, 256.0, 256.0)
"""Products from this (m, n, k) on count for `gemm_efficiency`."""
RESERVE = 2.0**30
"""Bytes of a core's share of memory left to the system."""


@frozen
class ProfileEntry:
    """One entry of the new profile."""

    key: str
    """Path in the file: `hbm`, `node.local_storage`, `coefficients.hbm_efficiency`."""
    value: float
    low: float | None
    """None: a rate or size of the machine, which files give without interval."""
    high: float | None
    prior: float | None
    """What the profile beneath says."""
    n: int
    unit: units.Dimension
    how: str
    moved: bool = True
    """False: not measured, but restated because what it is a share of has changed."""


@frozen
class Seen:
    """The session by name, over the profile beneath."""

    session: Session
    base: Profile
    known: bool
    """The profile beneath is about this very device: its datasheet holds."""

    @property
    def cpu(self) -> bool:
        """Whether the machine has no GPU: a core is its device."""
        return self.base.vendor == "cpu"

    def points(self, name: str) -> tuple[Measured, ...]:
        """All measured numbers of that name."""
        return tuple(m for m in self.session.measured if m.name == name)

    def one(self, name: str) -> Measured | None:
        """The only one."""
        return next(iter(self.points(name)), None)

    def coefficient(self, name: str, measured: Measured, how: str = "", roof: float = 1.0) -> ProfileEntry:
        """A coefficient of the measured number over `roof`."""
        before = self.base.coefficient(name)
        return ProfileEntry(
            key=f"coefficients.{name}",
            value=measured.value / roof,
            low=measured.low / roof,
            high=measured.high / roof,
            prior=before.value,
            n=measured.n,
            unit=before.dimension,
            how=how or measured.how,
        )

    def share(self, name: str, measured: Measured, roof: float) -> ProfileEntry:
        """An efficiency: the measured rate over the roof, its interval ending at 1."""
        entry = self.coefficient(name, measured, roof=roof)
        if entry.value > 1:
            return entry
        return replace(entry, high=max(entry.value, min(1.0, measured.high / roof)))

    def rate(
        self, key: str, value: float, n: int, how: str, unit: units.Dimension = "byte/s"
    ) -> ProfileEntry:
        """A rate or size of the machine, which files give without interval."""
        before: Any = self.base
        for name in key.split("."):
            before = before[name] if isinstance(before, Mapping) else getattr(before, name)
        return ProfileEntry(
            key=key, value=value, low=None, high=None, prior=before.value, n=n, unit=unit, how=how
        )

    def restated(self, name: str, roof: float, before: float) -> Iterator[ProfileEntry]:
        """The same byte/s of another roof, at most all of it, where a share was not measured itself."""
        c, factor = self.base.coefficient(name), before / roof
        if not math.isclose(factor, 1):
            yield ProfileEntry(
                key=f"coefficients.{name}",
                value=min(1.0, c.value * factor),
                low=min(1.0, c.low * factor),
                high=min(1.0, c.high * factor),
                prior=c.value,
                n=0,
                unit="1",
                how=f"same byte/s as before of another roof | {c.source}",
                moved=False,
            )


def _per_second(seconds: Measured, size: float = 1.0, how: str = "") -> Measured:
    """The rate at which `size` bytes take the measured time."""
    return replace(
        seconds,
        value=size / seconds.value,
        low=size / seconds.high,
        high=size / seconds.low,
        unit="byte/s",
        how=how or seconds.how,
    )


def changes(seen: Seen) -> list[ProfileEntry]:
    """Everything but the engine's overheads, which need these first."""
    parts = (_machine, _gemm, _memory, _links, _network, _storage, _optimizer, _starts)
    return [change for part in parts for change in part(seen)]


def split(entries: Sequence[ProfileEntry]) -> tuple[list[ProfileEntry], list[MissingProbe]]:
    """What can be kept, and efficiencies above 1: then the datasheet is another device's."""
    above = [c for c in entries if c.key.endswith(SHARES) and c.value > 1]
    refused = [
        MissingProbe(
            probe=c.key.removeprefix("coefficients."),
            reason=f"measured {c.value:.2f} of the datasheet, which nothing can pass: is this the right "
            "profile?",
        )
        for c in above
    ]
    return [c for c in entries if c not in above], refused


def best(m: Measured) -> float:
    """P90 of the repeats, without the widening."""
    return max(m.value, m.high / WIDENING)


def roof_of(seen: Seen) -> float:
    """Byte/s of device memory that nothing passes: datasheet, or the fastest copy or product seen.

    On a CPU small products read from the cache; they set the roof, so that measured times are never below it.
    """
    copy = seen.one("memory_copy")
    if seen.known or copy is None:
        return seen.base.hbm.value
    return max(best(copy), roof_rates(seen.points("gemm"))[1])


def peak_of(seen: Seen) -> tuple[float, str]:
    """FLOP/s that nothing passes, and where it comes from."""
    flop, _ = roof_rates(seen.points("gemm"))
    precision = "fp32" if seen.cpu else "bf16"
    if seen.known or not flop:
        return seen.base.peak[precision].value, seen.base.peak[precision].source  # type: ignore[index]
    machine = seen.session.machine
    if machine.peak >= flop:
        return machine.peak, f"{machine.peak_source}; best product measured {units.format(flop, 'flop/s')}"
    known = f", above {units.format(machine.peak, 'flop/s')} by {machine.peak_source}" if machine.peak else ""
    return flop, f"best product measured{known}"


def _machine(seen: Seen) -> Iterator[ProfileEntry]:
    """Sizes of a machine without datasheet."""
    machine = seen.session.machine
    if seen.known:
        return
    if machine.kind == "cuda":
        for key in ("memory", "usable_memory"):
            yield seen.rate(key, machine.gpu_memory, 1, "torch: total memory", "byte")
        return
    share = machine.memory / machine.cores
    free = min(share, max(RESERVE, machine.free / machine.cores - RESERVE / machine.cores))
    yield seen.rate("memory", share, 1, "a core's share of /proc/meminfo MemTotal", "byte")
    yield seen.rate("usable_memory", free, 1, "a core's share of MemAvailable less 1 GiB", "byte")
    yield seen.rate("node.host_memory", machine.memory, 1, "/proc/meminfo MemTotal", "byte")


def _gemm(seen: Seen) -> Iterator[ProfileEntry]:
    points = seen.points("gemm")
    if not points:
        return
    peak, why = peak_of(seen)
    if not seen.known:
        for precision in ("fp32", "bf16") if seen.cpu else ("bf16",):
            yield seen.rate(f"peak.{precision}", peak, sum(p.n for p in points), why, "flop/s")
    large = [p for p in points if all(a >= b for a, b in zip(p.at, LARGE, strict=True))] or list(points)
    low, middle, high = np.percentile([2 * math.prod(p.at) / p.value for p in large], [10, 50, 90])
    rate = Measured(
        name="gemm_rate",
        value=float(middle),
        low=float(low) / WIDENING,
        high=float(high) * WIDENING,
        n=sum(p.n for p in large),
        unit="flop/s",
        how=f"{len(large)} shapes from {LARGE[0]:g} x {LARGE[1]:g} x {LARGE[2]:g} on, {points[0].how}",
    )
    yield seen.share("gemm_efficiency", rate, peak)
    least = min(points, key=lambda p: p.value)
    yield seen.coefficient("gemm_latency", least, f"shortest product, {least.how}")


def _memory(seen: Seen) -> Iterator[ProfileEntry]:
    copy, together = seen.one("memory_copy"), seen.one("memory_copy_all")
    if copy is not None:
        roof = roof_of(seen)
        if not seen.known:
            yield seen.rate("hbm", roof, copy.n, "fastest copy or product seen, caches included")
        yield seen.share("hbm_efficiency", copy, roof)
        if not seen.points("optimizer_step"):
            yield from seen.restated("optimizer_hbm_efficiency", roof, seen.base.hbm.value)
    if together is not None and seen.cpu:
        roof = best(together)
        yield seen.rate("node.host_bandwidth", roof, together.n, together.how)
        once = replace(
            together,
            value=together.value / 2,
            low=together.low / 2,
            high=together.high / 2,
            how=f"{together.how}; bytes of the copy once",
        )
        yield seen.share("host_copy_efficiency", once, roof)
        yield from seen.restated("cpu_adam_efficiency", roof, seen.base.node.host_bandwidth.value)


def _links(seen: Seen) -> Iterator[ProfileEntry]:
    """Between device and host."""
    serial, down, up = seen.one("serialised_copy"), seen.one("host_to_device"), seen.one("device_to_host")
    if serial is not None:
        yield seen.rate("pcie", best(serial), serial.n, serial.how)
        yield seen.share("pcie_efficiency", serial, best(serial))
    if down is not None and up is not None:
        slow = min(down, up, key=lambda m: m.value)
        if not seen.known:
            yield seen.rate("pcie", best(slow), slow.n, slow.how)
        yield seen.share("pcie_efficiency", slow, seen.base.pcie.value if seen.known else best(slow))
    plain, latency = seen.one("pageable_copy"), seen.one("copy_latency")
    if plain is not None and down is not None:
        yield seen.share("pageable_fraction", plain, down.value)
    if latency is not None:
        yield seen.coefficient("pcie_latency", latency)


def _network(seen: Seen) -> Iterator[ProfileEntry]:
    """An all-reduce of S bytes over r ranks: gloo between nodes of one slot, NCCL inside a node.

        CPU:  2 (r-1)/r S/B + 2 ceil(log2 r) a        GPU:  2 (r-1)/r S/B + 2 (r-1) a

    as `kernels.collectives` prices them.
    """
    points = seen.points("all_reduce")
    if not points:
        return
    r = points[0].at[0]
    hops = 2 * math.ceil(math.log2(r)) if seen.cpu else 2 * (r - 1)
    rows = [(2 * (r - 1) / r * p.at[1], hops) for p in points]
    inverse, latency = nonnegative(rows, points)
    rate = _per_second(inverse)
    if seen.cpu:
        roof = max(rate.value, *(row[0] / p.value for row, p in zip(rows, points, strict=True)))
        yield seen.rate("nic", roof, rate.n, rate.how)
        yield seen.rate("scale_up.bandwidth", roof, rate.n, rate.how)
        yield seen.share("nic_efficiency", rate, roof)
        yield seen.share("nvlink_efficiency", rate, roof)
    else:
        yield seen.share("nvlink_efficiency", rate, seen.base.scale_up.bandwidth.value)
    for name in ("nic_latency", "nvlink_latency") if seen.cpu else ("nvlink_latency",):
        yield seen.coefficient(name, latency)


def _storage(seen: Seen) -> Iterator[ProfileEntry]:
    read, write = seen.one("storage_read"), seen.one("storage_write")
    if read is None or write is None:
        return
    roof, n = max(best(read), best(write)), read.n + write.n
    yield seen.rate("node.local_storage", roof, n, "fastest write or read seen")
    yield seen.share("local_storage_read_efficiency", read, roof)
    yield seen.share("local_storage_write", write, roof)
    if seen.cpu:
        slow, fast = sorted((read, write), key=lambda m: m.value)
        how = f"the same disk: runs of one machine share it; {slow.how}"
        both = replace(slow, high=max(fast.high, slow.high), how=how)
        yield seen.rate("node.shared_storage", roof, n, "the same disk")
        yield seen.share("shared_storage_efficiency", both, roof)


def _optimizer(seen: Seen) -> Iterator[ProfileEntry]:
    """t = a + b Psi; the cost model counts 34 bytes a parameter: 26 of states and weight, 8 of gradient.

    `a` is only fitted along: `optimizer_overhead` also holds the bookkeeping of a training engine, which
    this step has not.
    """
    points = seen.points("optimizer_step")
    if len(points) < 2:
        return
    _, each = nonnegative([(1.0, p.at[0]) for p in points], points)
    size = STATE_BYTES["adam"] + 2 * FP32
    rate = _per_second(each, size, f"{points[0].how}; {size:g} bytes a parameter")
    yield seen.share("optimizer_hbm_efficiency", rate, roof_of(seen))


_STARTS = {
    "group_start": "nccl_start_latency",
    "process_start": "process_start",
    "sleep": "sleep_latency",
    "wake": "wake_latency",
}
"""Measured name -> coefficient, unchanged."""


def _starts(seen: Seen) -> Iterator[ProfileEntry]:
    for name, coefficient in _STARTS.items():
        measured = seen.one(name)
        if measured is not None:
            yield seen.coefficient(coefficient, measured)
