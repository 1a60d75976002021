"""Workloads of the benchmarks are the same in all frameworks."""

import dataclasses
import io
import json
import time

import keras
import numpy as np
import pytest

import tf_dpsub
from benchmarks import group_normalization, step_time, steps
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
    assert logits.shape == (1, *y.shape[1:], workload.outputs)
    assert workload.classes > y.max()


def _count(weights):
    return sum(int(np.prod(w.shape)) for w in weights)


def test_data_are_the_same_each_time():
    for name in ("cnn", "lstm"):
        for a, b in zip(workloads.data(name), workloads.data(name)):
            np.testing.assert_array_equal(a, b)


def test_times():
    calls = []
    assert len(timing.times(lambda: calls.append(1), seconds=0)) == 5
    assert len(timing.times(lambda: calls.append(1), 0, fewest=1)) == 1
    assert len(calls) == 6
    assert len(timing.times(lambda: time.sleep(0.01), seconds=0.1)) > 5


class TestProgram:
    @pytest.fixture(name="program")
    def _program(self, monkeypatch, capsys):
        """Runs a program whose calls make two steps, and returns its output."""

        def run(*arguments, lines=""):
            monkeypatch.setattr(
                "sys.argv",
                ["program", "--workload=cnn", "--method=plain", *arguments],
            )
            monkeypatch.setattr("sys.stdin", io.StringIO(lines))
            calls = []

            def built(*_):
                return lambda: calls.append(1), 26_010, 26_010

            def built_epoch(*_):
                return lambda: calls.append(1) or 60.0, 26_010, 26_010

            timing.main(
                "x",
                "1",
                ["plain"],
                built,
                built_epoch,
                steps_per_call=lambda method: 2,
            )
            lines_printed = capsys.readouterr().out.splitlines()
            return [json.loads(line) for line in lines_printed], len(calls)

        return run

    def test_seconds(self, program):
        (result,), calls = program("--seconds=0")
        assert (result["framework"], result["method"]) == ("x", "plain")
        assert result["first_ms"] > 0
        assert len(result["ms"]) == 5
        # The first one and three others are not among the times.
        assert calls == 1 + 3 + 5

    def test_turns(self, program):
        (ready, *turns), calls = program("--turns", lines="0\n0\n")
        assert "ms" not in ready
        assert [len(turn["ms"]) for turn in turns] == [1, 1]
        assert all(turn["peak_mib"] > 0 for turn in turns)
        assert calls == 1 + 3 + 2

    def test_epochs(self, program):
        """They take their own time; the first one is not counted."""
        (result,), calls = program("--seconds=0", "--whole_epochs")
        assert result["ms"] == [
            1e3 * 60 / workloads.WORKLOADS["cnn"].steps_of_epoch
        ]
        assert calls == 2


def small():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    return model, np.ones([6, 4], "float32"), np.zeros(6, "int32")


def test_times_of_fit(monkeypatch):
    """Poisson batches of an epoch, beside steps on a batch of fixed size."""
    monkeypatch.setattr(step_time, "built", lambda name: small())
    sizes = dataclasses.replace(workloads.WORKLOADS["mlp"], steps_of_epoch=20)
    monkeypatch.setitem(workloads.WORKLOADS, "small", sizes)
    monkeypatch.setattr(
        step_time,
        "measure_steps",
        lambda made, blocks: {
            kind: [float(run()["loss"])] * blocks for kind, run in made.items()
        },
    )
    drawn = []
    original = tf_dpsub.PrivateModel.fit

    def fit(self, x, y, **arguments):
        drawn.append((len(x), arguments["batch_size"]))
        history = original(self, x, y, **arguments)
        assert self.ledger.entries[-1].sampler == "poisson"
        return history

    monkeypatch.setattr(tf_dpsub.PrivateModel, "fit", fit)
    results = {"small": step_time.measure("small", 2, 2)}
    # One epoch is not timed.
    assert drawn == [(6 * 20, 6)] * 3
    ms = results["small"]["ms"]
    assert ms.keys() == {
        "plain",
        "private",
        "without noise",
        "fit, plain",
        "fit, private",
    }
    assert all(value > 0 for value in ms.values())
    assert "small" in step_time.table(results).splitlines()[-1]


def test_another_model_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["program", "--workload=cnn", "--method=plain"]
    )
    with pytest.raises(ValueError, match="Expected 26,010 parameters"):
        timing.main("x", "1", ["plain"], lambda *_: (int, 26_011, 26_011), None)
    assert not capsys.readouterr().out


def test_impossible_methods_have_a_reason(monkeypatch, capsys):
    def built(workload, method):
        raise NotImplementedError(f"no {method} of {workload}")

    monkeypatch.setattr(
        "sys.argv", ["program", "--workload=cnn", "--method=plain"]
    )
    timing.main("x", "1", ["plain"], built, None)
    assert '"impossible": "no plain of cnn"' in capsys.readouterr().out


def test_a_model_without_normalization():
    """All other layers stay, and both models are timed in turns."""
    model = keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.GroupNormalization(2),
            keras.layers.ReLU(),
        ]
    )
    short = group_normalization.without_normalization(model)
    assert short.count_params() == model.count_params() - 8
    x = np.ones([2, 4, 4, 3], "float32")
    short.set_weights(model.get_weights()[:1])
    np.testing.assert_allclose(
        short(x), keras.ops.relu(model.layers[0](x)), rtol=1e-6
    )


def test_the_share_of_normalization(monkeypatch):
    def times(kinds, blocks):
        for run in kinds.values():
            assert np.isfinite(float(run()["loss"]))
        return {kind: [2.0 if kind[1] else 1.5] * blocks for kind in kinds}

    small = keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            keras.layers.GroupNormalization(2),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    data = np.ones([6, 4, 4, 2], "float32"), np.zeros(6, "int32")
    monkeypatch.setattr(
        group_normalization,
        "built",
        lambda name: (keras.models.clone_model(small), *data),
    )
    monkeypatch.setattr(group_normalization, "measure_steps", times)
    shares = group_normalization.measure("any", 3)
    assert set(shares) == {"plain", "private"}
    for one in shares.values():
        assert one == {"ms": 2000.0, "share": 0.25}
