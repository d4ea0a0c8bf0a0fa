"""Structure-aware fuzzing of every file that a command reads, and of every option; `kills`: commands killed while they write.

    python -m lab.fuzz --cases 20000 --seed 7        # defects by place; exit code 1 where there are any
    python -m lab.fuzz --seed 7 --case 4711          # one case again, with its traceback and its file

Bad input may end in an answer, or in one error with exit code 2. A defect is any other exception, a hang, a
crash of the interpreter, or an output that is left half-written.

What is costly behind the door does not run (`lab.fuzz.execute.COSTLY` and `TRIES`): searches of design, size,
choose and whatif, the best plan of estimate and memory without a file, the fit of calibrate, the changes that
doctor prices. Their questions are read and checked. demo, desk and profile start servers and benchmarks and
are left out, and so is launch without `--dry-run --assume-cluster`.
"""
