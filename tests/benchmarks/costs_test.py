"""Costs of a private step on any machine."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from benchmarks import costs, steps
from tf_dpsub.models import resnet

A, B = tf.zeros([3, 4]), tf.zeros([4, 5])


class TestCosts:
    @pytest.mark.parametrize(
        "function, inputs, flop",
        [
            (tf.matmul, (A, B), 2 * 3 * 4 * 5),
            (
                functools.partial(tf.matmul, transpose_a=True),
                (tf.transpose(A), B),
                2 * 3 * 4 * 5,
            ),
            (tf.matmul, (tf.zeros([7, 3, 4]), B[None] * 1), 7 * 2 * 3 * 4 * 5),
            (
                functools.partial(tf.matmul, transpose_a=True),
                (tf.zeros([7, 4, 3]), tf.zeros([7, 4, 5])),
                7 * 2 * 3 * 4 * 5,
            ),
            (
                functools.partial(tf.einsum, "abc,cd->abd"),
                (tf.zeros([7, 3, 4]), B),
                7 * 2 * 3 * 4 * 5,
            ),
            (tf.add, (A, A), 0),
        ],
    )
    def test_flop_of_products(self, function, inputs, flop):
        assert costs.of(function, *inputs).flop == flop

    def test_flop_of_a_convolution_and_its_gradients(self):
        x, kernel = tf.zeros([2, 8, 8, 3]), tf.Variable(tf.zeros([3, 3, 3, 5]))

        def gradients(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.nn.conv2d(x, kernel, 2, "SAME")
            return tape.gradient(y, [x, kernel])

        one = 2 * (2 * 4 * 4 * 5) * (3 * 3 * 3)
        result = costs.of(gradients, x)
        assert result.flop == 2 * one
        forward = costs.of(lambda x: tf.nn.conv2d(x, kernel, 2, "SAME"), x)
        assert forward.flop == one
        assert forward.bytes == 4 * 2 * 4 * 4 * 5

    def test_unused_results_cost_nothing(self):
        def function(a):
            tf.matmul(a, B)
            return a + 1.0

        result = costs.of(function, A)
        assert (result.flop, result.bytes) == (0, A.dtype.size * 12)
        assert result.operations == {"AddV2": 1}

    def test_changes_of_states_are_needed(self):
        total = tf.Variable(tf.zeros([3, 5]))

        def function(a):
            total.assign(tf.matmul(a, B))
            return a

        assert costs.of(function, A).flop == 2 * 3 * 4 * 5

    def test_functions_that_are_called(self):
        inner = tf.function(lambda a: tf.matmul(a, B))
        assert costs.of(lambda a: inner(a) + 1.0, A).flop == 2 * 3 * 4 * 5

    def test_unknown_sizes(self):
        def function(a):
            return tf.boolean_mask(a, a[:, 0] > 0) * 2.0

        with pytest.raises(ValueError, match="static shapes, got .*mul"):
            costs.of(function, A)


@pytest.fixture(autouse=True, scope="module")
def _shallow():
    """One block in each stage, two layers of BERT: more are counted alike."""
    with pytest.MonkeyPatch.context() as patch:
        stages = resnet._stages
        patch.setattr(
            resnet,
            "_stages",
            lambda x, block, width, blocks, groups: stages(
                x, block, width, 1, groups
            ),
        )
        patch.setattr(steps, "bert", functools.partial(steps.bert, layers=2))
        yield


of_plain = functools.cache(costs.of_plain)


def slow(name, *values):
    return pytest.param(name, *values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name, flop, size",
    [
        ("cnn", 1.02, 3.8),
        ("mlp", 1.02, 5.6),
        slow("resnet20", 1.09, 1.7),
        slow("wrn28_4", 1.14, 2.7),
        slow("bert_frozen", 1.10, 1.15),
        # No gradient of an example is as large as the vocabulary.
        slow("bert", 1.10, 1.28),
    ],
)
def test_dpsgd_costs_little_more_than_keras(name, flop, size):
    """Bounds are measured costs and a few percent."""
    plain, private = of_plain(name), costs.of_private(name, costs.dpsgd)
    assert 1 <= private.flop / plain.flop < flop
    assert 1 <= private.bytes / plain.bytes < size


@pytest.mark.slow
def test_carriers_save_gradients_of_kernels():
    rgp = functools.partial(costs.dpsgd, make=tf_dpsub.optimizers.RGP)
    plain = of_plain("bert_frozen")
    private = costs.of_private("bert_frozen", rgp, carrier_rank=8)
    assert private.flop / plain.flop < 0.72


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_costs_grow_with_the_batch(name):
    few, many = (
        costs.of_private(name, costs.dpsgd, rows=rows) for rows in (50, 200)
    )
    for quantity in ("flop", "bytes"):
        ratio = getattr(many, quantity) / getattr(few, quantity)
        assert np.log(ratio) / np.log(4) < 1.05


@pytest.mark.slow
def test_step_takes_little_longer_than_keras():
    """It takes twice as long alone, and may take more beside other tests."""
    plain, x, y = steps.built("cnn")
    private = tf_dpsub.make_private(steps.built("cnn")[0])
    runs = {
        "plain": steps.step(plain, x, y, keras.optimizers.SGD(0.01)),
        "private": steps.step(private, x, y, costs.dpsgd(len(y))),
    }
    times = steps.measure_steps(runs, blocks=9)
    assert min(times["private"]) / min(times["plain"]) < 4


@pytest.mark.slow
def test_program(capsys):
    assert costs.main(["costs", "mlp"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| MLP 784-128-128-10, batch 250 | 0.1 | 2 | 1.0")
    assert row.count("|") == head.count("|")


@pytest.mark.parametrize("names", [[], ["mpl"]])
def test_unknown_workloads(names):
    message = costs.main(["costs", *names])
    assert "Expected workloads among cnn, mlp" in message
    assert message.endswith(f"got {names[0] if names else 'none'}.")
