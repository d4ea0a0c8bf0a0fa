"""Structure-aware fuzzing of every file that a command reads, and of every option; `kills`: commands killed while they write.

    python -m lab.fuzz --cases 20000 --seed 7        # defects by place; exit code 1 where there are any
    python -m lab.fuzz --seed 7 --case 4711          # one case again, with its traceback and its file

Bad input may end in an answer, or in one error with exit code 2. A defect is any other exception, a hang, a
crash of the interpreter, an output that is left half-written, or a file of somebody else that is changed.

Spoiled are (`lab.fuzz.seeds`): scenarios, profiles whole and derived, models' config.json, lengths, prices, what-if
files, their curves, answers and kept designs; plans of both schemas, run folders, measured tables;
configurations and logs of all seven frameworks, printed, as event files, JSON lines and trainer_state.json, alone
and as a folder; settings, model folders, data (JSONL, JSON, CSV, Parquet, gzip) and checkpoints of a launch. Beside
them stand whole files of another format, pipes, devices and loops. Every option and argument of every command
(`lab.fuzz.options`), also of demo, desk and profile measure, but `--open` and `--help`.

What is costly behind the door does not run (`COSTLY`, `STARTS` and `TRIES` of `lab.fuzz.execute`): searches of
design, size, choose and whatif, the best plan of estimate and memory without a file, the fit of calibrate, the
changes that doctor prices, the server of the desk, micro-benchmarks, models that demo and `--scale` build, and
every Ray cluster, one of this machine or one that is joined: launch ends where its first worker would start.
Their questions are read and checked. Not spoiled: weights, tokenizers, what workers send each other
(tests/executor/test_channel_secret.py), replies of a judge, user code.
"""
