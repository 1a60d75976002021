"""Workloads of the benchmarks are those that every framework has."""

import keras
import numpy as np
import pytest

from benchmarks import steps
from benchmarks.peers import timing, workloads


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n == "gpt2" else ())
        for n in workloads.WORKLOADS
    ],
)
def test_model_is_that_of_the_workload(name):
    workload = workloads.WORKLOADS[name]
    model, x, y = steps.built(name)
    assert _count(model.weights) == workload.parameters
    assert _count(model.trainable_variables) == workload.trained
    inputs = x["token_ids"] if isinstance(x, dict) else x
    assert len(inputs) == len(y) == workload.batch
    logits = model(keras.tree.map_structure(lambda a: a[:1], x))
    assert logits.shape == (1, *y.shape[1:], workload.classes)
    assert workload.classes > y.max()


def _count(weights):
    return sum(int(np.prod(w.shape)) for w in weights)


def test_data_are_the_same_each_time():
    for name in ("cnn", "lstm"):
        for a, b in zip(workloads.data(name), workloads.data(name)):
            np.testing.assert_array_equal(a, b)


def test_times_leave_out_what_comes_first():
    calls = []
    found = timing.times(lambda: calls.append(1), seconds=0)
    assert len(found) == 5
    assert len(calls) == 8


def test_another_model_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["program", "--workload=cnn", "--method=plain"]
    )
    with pytest.raises(ValueError, match="Expected 26,010 parameters"):
        timing.main("x", "1", ["plain"], lambda *_: (int, 26_011, 26_011))
    assert not capsys.readouterr().out


def test_what_is_impossible_has_a_reason(monkeypatch, capsys):
    def built(workload, method):
        raise NotImplementedError(f"no {method} of {workload}")

    monkeypatch.setattr(
        "sys.argv", ["program", "--workload=cnn", "--method=plain"]
    )
    timing.main("x", "1", ["plain"], built)
    assert '"impossible": "no plain of cnn"' in capsys.readouterr().out
