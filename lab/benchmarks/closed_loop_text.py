"""Words of reports/calibration.md; figures are filled in by closed_loop_report.py."""

from __future__ import annotations

TEXT = """# Closed loop on a CPU

Output of `PYTHONPATH=. python lab/benchmarks/closed_loop.py`: {runs} real runs (Ray, DeepSpeed, vLLM) of {configs} configurations; the cost
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

The split is a rule that was written down before any run (`lab/benchmarks/closed_loop_runs.py`): configurations come in pairs of one architecture;
the first of a pair calibrates, the second is predicted, and every level of every factor stands on both sides. Prompts and responses have
fixed lengths: the models cannot end a response. `others`: cores that other processes of the machine kept busy during the steps. A
whole run takes {start:.0f} s (median), nearly all of it start-up, which no figure above contains. At least {least} steps of every run were counted.

{configurations}

Runs of the schedule that are missing: {absent}.

The model of the rows without `wide` has 256 hidden and 8 layers (4.8 M parameters), `wide` 512 and 8 (19 M).
"""

READING = """Written about the runs of 2026-11-21; a new set of runs needs new words.

* Targets are held by the median. The step meets its own only because repeats of one configuration differ as much as they do: without
  them the limit would be 8.0 %, and 8.3 % was reached. Three of seven steps are above 8.5 %, five above 8.0 %. The shipped profile had a smaller
  median (5.1 %) and larger outliers: the mean over the seven is 13.6 % cold and 11.2 % calibrated. Most predictions are too slow, because
  the calibration runs met a slower machine than the predicted ones.
* The first takes of `naive-a`, `smart-a` and `hybrid-a`, which count here, ran beside tests on the same two cores. They were taken
  again after the errors were known, so that this set is no evidence of its own: with the second takes the medians are 10.0 % (phases),
  4.9 % (step) and 3.9 % (step of the second model).
* `long-b` is the worst: every phase of it was predicted 23 to 47 % too slow. Its two ranks did not slow each other, those of the
  calibration runs did. That is the state of the machine, and no coefficient of a profile.
* Weight sync errs most: by 20 % in the same model; in the wider one `disk` and `broadcast` take half of what was predicted and `ipc` twice. Runs of one
  size cannot tell time by byte from time by tensor; and on a CPU a bucket is copied into shared memory, which the equation of `ipc` does not have.
* Generation of the wider model is predicted 14 to 17 % too fast: products of a few rows run at a lower rate than those of training, and the
  profile has one rate for both. Scoring is predicted too slow, so that the step comes out better than its phases.
* `offloaded` roles: emptying caches (`sleep_latency`) is fitted on one run and was a quarter to a third shorter in the predicted one.
* `cold` is not blind: the cost model and the priors of `cpu-core` (peak, launch, sampling, ZeRO-3 hooks, optimizer step, blocking moves) were
  repaired on calibration runs and discarded trials of them, before any evaluated run was looked at, and not after. What
  was in the profile before did not have these terms; on GPUs they are neutral.
* Earlier takes of the seven calibration runs were discarded unseen by the evaluation: other work of the machine had the same priority then.
  Three of the evaluated runs (`naive-b`, `smart-b`, `hybrid-b`) are from that session, after the priority was raised."""
