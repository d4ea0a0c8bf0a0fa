"""Words of reports/calibration.md; figures are filled in by closed_loop_report.py."""

from __future__ import annotations

TEXT = """# Closed loop on a CPU

Output of `PYTHONPATH=. python benchmarks/closed_loop.py`: {runs} real runs (Ray, DeepSpeed, vLLM) of {configs} configurations; the cost
model is calibrated on some of them and predicts the others.

Machine: 2 cores, {machine}, shared with other work; one thread a process, fp32; {used}. Profile `cpu-core`.

{targets}

An error is |predicted / measured - 1| of medians over counted steps, priced at the measured lengths. The figure that a target is held
against is the median over phases (those of at least {short} of their step) or over runs; `worst` is the largest. The target for the
step is {short_target}, or {spreads} times the repeat-to-repeat spread where that is more: {spread} here, the standard deviation of ln
seconds between {repeats} runs of {repeated}.

![predicted against measured seconds, before and after calibration](calibration.svg)

{reading}

## Steps

Seconds, medians over the counted steps; `n` of them were counted (of {iterations}: the first one, and those in which the clock was set, are not).

{steps}

## Phases of the predicted runs

{phases}

Not in the cost model: {unpriced}.

## Phases of the second model

{second}

## Coefficients

SI units. Fitted on {data} times of the runs with role `calibrate`; `data` and `runs` say how many of them a coefficient moves.

{coefficients}

Not told by these runs, so unchanged: {unidentified}.

Outliers of the fit: {outliers}.

## What was run

The split is a rule that was written down before any run (`benchmarks/closed_loop_runs.py`): configurations come in pairs of one architecture;
the first of a pair calibrates, the second is predicted, and every level of every factor stands on both sides. Prompts and responses have
fixed lengths: the models cannot end a response. `others`: cores that other processes of the machine kept busy during the steps. A
whole run takes {start:.0f} s (median), nearly all of it start-up, which no figure above contains. At least {least} steps of every run were counted.

{configurations}

Runs of the schedule that are missing: {absent}.

The model of the rows without `wide` has 256 hidden and 8 layers (4.8 M parameters), `wide` 512 and 8 (19 M).
"""

READING = """"""
