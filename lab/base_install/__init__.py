"""Every command that the README, a help text or an answer recommends, run in an install without extras.

    python -m lab.base_install --venv DIR     # a virtual environment with the wheel and its dependencies only

Each ends with 0 or 1 (nothing fits), or with 2 and the one line of pip that is missing; none with a traceback.
Commands run outside the checkout, each in a copy of a folder of inputs; questions are small, but for the first
command of the README. What an answer recommends runs next, in the folder of that answer.
"""
