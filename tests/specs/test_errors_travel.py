from __future__ import annotations

import pickle

from rlhfsim.errors import Place, RlhfsimError


def test_an_error_that_is_built_again_from_its_arguments_or_pickled_says_the_same() -> None:
    error = RlhfsimError("bad-value", "a is 3", place=Place(file="x.yaml", line=2), help="give 4")
    for again in (type(error)(*error.args), pickle.loads(pickle.dumps(error))):
        assert str(again) == str(error)
        assert again.code == "bad-value"
