"""Deterministic fault simulation of the coordination layer: `python -m lab.schedules --seed 0 --count 1000`.

Driver, workers, replicas, rewards, disk and clock are one seeded process in the way of FoundationDB (Zhou et
al. 2021, SIGMOD, section 4). Launch, restart loop, worker groups, saver, checkpoints, amendments and the run
folder are the real ones; Ray's handles, engines, the disk's failures and the clocks are simulated. A schedule
submits the documented line (`launch ... --out RUN --resume`) until the run is done, and lets faults happen at
drawn operations. Each line must end exact, or with a reason that a fault of its own explains, and the last
checkpoint must have the bits of a run that nothing happened to.

Of an asynchronous plan (`--asynchronous`: requests that end before new weights, partial rollouts, weights that
arrive in flight) the samples depend on the clock, so that no two runs are equal. There each token must be young
enough and of the weights that its version says, each group is trained on once, and none is left behind.

Not simulated: other threads within the driver than the one that feeds an asynchronous rollout, whose turns come
while the driver waits, and the libraries under the engines.
"""
