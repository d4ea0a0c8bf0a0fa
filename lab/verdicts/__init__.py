"""A fuzzer that plays the program's side of a code reward: no wrong program may pass, right ones must.

    python -m lab.verdicts --messages 1000000 --real 2000 --right 500 --seed 1      # exit code 1 where one fails

200 tests in the styles of HumanEval+, MBPP+, MBPP and unittest (`lab.verdicts.tasks`), each with a right and a wrong
program. Against the verifier in this process, every message of the program is the wrong program's own, that one
spoiled, one from a grammar of replies, or one that has led far before (`lab.verdicts.opponent`); against the real
sandbox, a wrong program sends such messages in place of its own. No message holds a number that a right answer
holds, and one answer of every predicate is wrong: a pass is a forgery, never a guess. Right programs run in the real
sandbox, as they are.
"""
