"""A step over Poisson batches follows from those of one pass and of two."""

import pytest

import tf_dpsub
from benchmarks import pass_times
from tests.benchmarks.steps_test import small


def test_mean_over_poisson_batches(monkeypatch):
    made = []

    def step(name, size, passes, batch_size):
        made.append((size, passes, batch_size))
        return lambda: clock.append(clock[-1] + 1e-3 * (5 + passes * size))

    clock = [0.0]
    monkeypatch.setattr(pass_times, "_step", step)
    monkeypatch.setattr(pass_times.steps, "built", lambda name: small())
    monkeypatch.setattr(pass_times.time, "perf_counter", lambda: clock[-1])
    results = pass_times.measure("small", [4, 100], 3)
    assert made == [(4, 1, 6), (4, 2, 6), (100, 1, 6), (100, 2, 6)]
    assert results[4]["pass"] == pytest.approx(4)
    assert results[4]["beside"] == pytest.approx(5)
    # No Poisson batch of 6 has more than 100 rows.
    assert results[100]["step"] == pytest.approx(105)
    assert results[100]["rows"] == pytest.approx(100 / 6)
    # One pass for up to 4 rows, two for up to 8, and so on.
    assert results[4]["step"] == pytest.approx(5 + results[4]["rows"] * 6)


def test_a_step_of_full_passes(monkeypatch):
    monkeypatch.setattr(pass_times.steps, "built", lambda name: small())
    made = []
    make_private = tf_dpsub.make_private

    def make(model):
        made.append(make_private(model))
        return made[-1]

    monkeypatch.setattr(tf_dpsub, "make_private", make)
    pass_times._step("small", 4, 2, 6)()
    (model,) = made
    assert model.microbatch_size == 4 and model.ledger.steps == 1
