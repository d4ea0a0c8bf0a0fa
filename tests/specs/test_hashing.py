"""Hashes that are computed once."""

from __future__ import annotations

import pickle
from dataclasses import replace

from rlhfsim.specs.placement.layout import Layout


def test_equal_layouts_have_one_hash_and_changed_ones_compute_their_own() -> None:
    one, two = Layout(tp=2), Layout(tp=2)
    assert hash(one) == hash(two)
    assert hash(one) == hash(one)  # the remembered one
    assert hash(replace(one, tp=4)) == hash(Layout(tp=4)) != hash(one)


def test_a_remembered_hash_stays_behind_when_an_object_travels() -> None:
    one = Layout(tp=2)
    hash(one)
    moved = pickle.loads(pickle.dumps(one))
    assert moved == one
    assert not hasattr(moved, "_hash")  # strings hash otherwise in another process
