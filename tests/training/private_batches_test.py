"""What `fit` and `train_on_batch` accept, sample, weigh and record."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training.plain_models import (
    EXACT,
    EXAMPLES,
    FEATURES,
    W,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    fit_plainly,
    linear,
    loss,
    private,
    twin,
)
from tf_dpsub import accounting, data


class Count(keras.metrics.Sum):
    """Counts the examples that a metric sees."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        ones = tf.ones([tf.shape(y_pred)[0], 1])
        super().update_state(ones, sample_weight)


def batches_of(*sizes):
    """A dataset of the examples, cut into batches; its length is not known."""
    ends = list(itertools.accumulate(sizes))
    return tf.data.Dataset.from_generator(
        lambda: ((X[e - n : e], Y[e - n : e]) for n, e in zip(sizes, ends)),
        output_signature=(
            tf.TensorSpec([None, FEATURES], tf.float32),
            tf.TensorSpec([None], tf.int64),
        ),
    )


def train_plainly(plain, dataset, batch_size, learning_rate=0.1):
    """Keras on the sum over each batch, divided by the public batch size."""
    rate = learning_rate / batch_size
    plain.compile(keras.optimizers.SGD(rate), loss("sum"), run_eagerly=True)
    for x, y in dataset:
        plain.train_on_batch(x, y)


def exact(batch_size=EXAMPLES, **arguments):
    return dpsgd(batch_size=batch_size, **EXACT, **arguments)


class TestWeights:
    def test_sample_weight(self):
        plain = linear()
        expected = twin(plain)
        metrics = [Count(name="count")]
        model = private(plain, exact(), metrics=metrics)
        history = model.fit(X, Y, sample_weight=W, epochs=3, verbose=0).history
        fit_plainly(expected, keras.optimizers.SGD(0.1), sample_weight=W)
        assert_same_weights(plain, expected)
        assert history["count"] == [EXAMPLES] * 3

    def test_class_weight(self):
        plain = linear()
        expected = twin(plain)
        class_weight = {0: 0.5, 1: 2.0, 2: 3.0}
        model = private(plain, exact())
        model.fit(X, Y, class_weight=class_weight, epochs=3, verbose=0)
        fit_plainly(
            expected, keras.optimizers.SGD(0.1), class_weight=class_weight
        )
        assert_same_weights(plain, expected)

    def test_metrics_are_those_of_evaluation(self):
        """Without a learning rate, training sees the same weights."""
        metrics = {
            "metrics": [
                "accuracy",
                keras.metrics.SparseTopKCategoricalAccuracy(2),
            ],
            "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy()],
        }
        plain = keras.Sequential([linear(), keras.layers.Softmax()])
        optimizer = dpsgd(
            keras.optimizers.SGD(0.0), batch_size=EXAMPLES, **EXACT
        )
        model = private(
            plain,
            optimizer,
            loss="sparse_categorical_crossentropy",
            **metrics,
        )
        history = model.fit(X, Y, sample_weight=W, verbose=0).history
        expected = model.evaluate(
            X, Y, sample_weight=W, verbose=0, return_dict=True
        )
        assert history.pop("dropped") == [0.0]
        assert set(history) == set(expected)
        for name, value in expected.items():
            assert history[name] == pytest.approx([value], rel=1e-5)

    def test_weight_zero_contributes_nothing(self):
        plain = linear()
        before = plain.get_weights()
        model = private(plain, exact())
        model.fit(X, Y, sample_weight=np.zeros(EXAMPLES), verbose=0)
        for own, other in zip(plain.get_weights(), before, strict=True):
            np.testing.assert_array_equal(own, other)


class TestPoisson:
    def test_arrays_are_sampled(self):
        """Batches differ in size: that of shuffled arrays would not."""
        seen = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(logs["count"])
        )
        model = private(
            linear(), exact(seed=3, batch_size=4), metrics=[Count(name="count")]
        )
        model.fit(X, Y, steps_per_epoch=50, callbacks=[count], verbose=0)
        drawn = np.diff([0.0, *seen])
        # Of twenty examples, each with probability a fifth.
        assert abs(drawn.mean() - 4) < 4 * np.sqrt(3.2 / 50)
        assert 1.5 < drawn.var() < 6
        (entry,) = model.ledger.entries
        assert entry.sampler == "poisson"
        assert (entry.batch_size, entry.examples) == (4, EXAMPLES)

    def test_every_batch_of_a_sampler_is_trained_on(self):
        model = private(
            linear(), exact(batch_size=4), metrics=[Count(name="count")]
        )
        first, same = (
            data.PoissonBatches(X, Y, batch_size=4, seed=3) for _ in range(2)
        )
        history = model.fit(first, epochs=2, verbose=0).history
        drawn = [
            float(tf.reduce_sum(b["real"])) for b in same.dataset().take(10)
        ]
        # Rows that pad a batch do not count.
        assert history["count"] == [sum(drawn[:5]), sum(drawn[5:])]

    def test_draws_differ_without_a_seed(self):
        weights = []
        plain = linear()
        model = private(plain, exact(batch_size=4))
        for _ in range(2):
            plain.set_weights([np.ones_like(w) for w in plain.get_weights()])
            model.fit(X, Y, verbose=0)
            weights.append(plain.get_weights()[0])
        assert not np.array_equal(*weights)

    def test_explicit_batches(self):
        model = private(linear(), dpsgd())
        model.fit(data.PoissonBatches(X, Y, batch_size=4), verbose=0)
        (entry,) = model.ledger.entries
        assert (entry.sampler, entry.examples) == ("poisson", EXAMPLES)
        assert not entry.fixed_seed
        assert model.ledger.steps == 5
        # A seed of the batches is recorded.
        model.fit(data.PoissonBatches(X, Y, batch_size=4, seed=1), verbose=0)
        assert model.ledger.entries[-1].fixed_seed

    def test_draw_beyond_the_capacity_is_not_truncated(self, monkeypatch):
        """All examples, in three times the rows that were foreseen."""
        monkeypatch.setattr(data.PoissonBatches, "capacity", lambda self, *_: 8)
        plain = linear()
        expected = twin(plain)
        model = private(plain, exact(), metrics=[Count(name="count")])
        history = model.fit(X, Y, epochs=3, verbose=0).history
        fit_plainly(expected, keras.optimizers.SGD(0.1))
        assert_same_weights(plain, expected)
        assert history["count"] == [EXAMPLES] * 3


def _epsilon(noise_multiplier, sampling_rate):
    """Epsilon of two epochs of five steps."""
    return accounting.epsilon(
        noise_multiplier=noise_multiplier,
        sampling_rate=sampling_rate,
        steps=10,
        delta=1e-5,
    )


class TestDatasets:
    def test_partial_batch_is_divided_by_the_public_size(self):
        plain = linear()
        expected = twin(plain)
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        model = private(plain, exact(batch_size=8))
        model.fit(dataset, verbose=0)
        train_plainly(expected, dataset, batch_size=8)
        assert_same_weights(plain, expected)
        (entry,) = model.ledger.entries
        assert entry.sampler != "poisson"
        assert model.ledger.steps == 3

    @pytest.mark.filterwarnings("ignore:Your input ran out of data")
    def test_batches_of_differing_sizes(self):
        """Several in an execution, of which the last is not full."""
        plain = linear()
        expected = twin(plain)
        dataset = batches_of(3, 8, 5, 1)
        model = private(
            plain,
            exact(batch_size=6),
            metrics=[Count(name="count")],
            steps_per_execution=3,
        )
        history = model.fit(dataset, epochs=2, verbose=0).history
        train_plainly(expected, dataset.repeat(2), batch_size=6)
        assert_same_weights(plain, expected)
        assert history["count"] == [17, 17]
        assert model.ledger.steps == int(model.optimizer.iterations) == 8

    def test_infinite_dataset(self):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()
        model = private(linear(), dpsgd(), steps_per_execution=4)
        model.fit(dataset, steps_per_epoch=6, epochs=2, verbose=0)
        assert model.ledger.steps == int(model.optimizer.iterations) == 12

    def test_sample_weights_of_a_dataset(self):
        plain = linear()
        expected = twin(plain)
        dataset = tf.data.Dataset.from_tensor_slices((X, Y, W))
        private(plain, exact()).fit(dataset.batch(EXAMPLES), verbose=0)
        fit_plainly(expected, keras.optimizers.SGD(0.1), 1, sample_weight=W)
        assert_same_weights(plain, expected)

    def test_is_accounted_for_without_amplification(self):
        sigma, delta = 4.0, 1e-5
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        model = private(linear(), dpsgd(noise_multiplier=sigma))
        model.fit(dataset, epochs=2, verbose=0)
        one_gaussian = 1 / (2 * (sigma**2 / 10))
        # Ten Gaussians are one of multiplier sigma / sqrt(10): this epsilon
        # follows from its Renyi divergence at any one order.
        order = 1 + math.sqrt(math.log(1 / delta) / one_gaussian)
        bound = one_gaussian * order + math.log(1 / delta) / (order - 1)
        assert 0.7 * bound < model.epsilon(delta) < bound
        sampled = _epsilon(sigma, sampling_rate=4 / EXAMPLES)
        assert sampled < 0.7 * model.epsilon(delta)

    def test_once_per_epoch_counts_epochs(self):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        stated = private(linear(), dpsgd())
        stated.fit(
            dataset, epochs=2, each_example_once_per_epoch=True, verbose=0
        )
        assert stated.epsilon(1e-5) < _epsilon(1.0, sampling_rate=1.0)
        (entry,) = stated.ledger.entries
        assert entry.each_example_once_per_epoch
        assert (entry.steps, entry.epochs) == (10, 2)


class TestTrainOnBatch:
    def test_equals_keras(self):
        plain = linear()
        expected = twin(plain)
        model = private(plain, exact(batch_size=6))
        for n in (6, 6, 4):
            model.train_on_batch(X[:n], Y[:n])
        sizes = [(X[:n], Y[:n]) for n in (6, 6, 4)]
        train_plainly(expected, sizes, batch_size=6)
        assert_same_weights(plain, expected)
        (entry,) = model.ledger.entries
        assert entry.sampler != "poisson"
        assert model.ledger.steps == 3

    @pytest.mark.parametrize("weights", ["sample_weight", "class_weight"])
    def test_weights(self, weights):
        classes = {0: 0.5, 1: 2.0, 2: 3.0}
        given = {"sample_weight": W, "class_weight": classes}[weights]
        plain = linear()
        expected = twin(plain)
        model = private(plain, exact())
        model.train_on_batch(X, Y, **{weights: given})
        fit_plainly(expected, keras.optimizers.SGD(0.1), 1, **{weights: given})
        assert_same_weights(plain, expected)

    def test_returns_what_keras_does(self):
        plain = linear()
        expected = twin(plain)
        model = private(plain, exact(), metrics=["accuracy"])
        expected.compile("sgd", loss(), metrics=["accuracy"], run_eagerly=True)
        reference = expected.train_on_batch(X, Y, return_dict=True)
        logs = model.train_on_batch(X, Y, return_dict=True)
        assert logs.pop("dropped") == 0
        assert logs == pytest.approx(reference, rel=1e-5)
        # Metrics are of this batch alone.
        model.train_on_batch(X[:3], Y[:3])
        values = model.train_on_batch(X, Y)
        evaluated = model.evaluate(X, Y, verbose=0)
        assert len(values) == 3
        assert values[0] > evaluated[0]


class TestValidation:
    def test_split_is_neither_trained_on_nor_counted(self):
        plain = linear()
        expected = twin(plain)
        model = private(plain, exact(batch_size=15))
        history = model.fit(
            X, Y, validation_split=0.25, epochs=3, verbose=0
        ).history
        expected.compile(
            keras.optimizers.SGD(0.1), loss("sum"), run_eagerly=True
        )
        train_plainly(expected, [(X[:15], Y[:15])] * 3, batch_size=15)
        assert_same_weights(plain, expected)
        assert model.ledger.entries[0].examples == 15
        expected = model.evaluate(X[15:], Y[15:], verbose=0)
        assert history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)

    def test_data(self):
        model = private(linear(), dpsgd(), metrics=["accuracy"])
        for held_out in (
            (X[:5], Y[:5]),
            tf.data.Dataset.from_tensor_slices((X[:5], Y[:5])).batch(2),
        ):
            history = model.fit(
                X, Y, epochs=2, validation_data=held_out, verbose=0
            ).history
            expected = model.evaluate(X[:5], Y[:5], verbose=0, return_dict=True)
            for name, value in expected.items():
                assert history[f"val_{name}"][-1] == pytest.approx(
                    value, rel=1e-5
                )
            assert len(history["val_loss"]) == 2
        assert model.ledger.steps == 20


@pytest.mark.parametrize("beside", [{"y": Y}, {"sample_weight": W}])
@pytest.mark.parametrize("kind", ["a dataset", "Poisson batches"])
def test_targets_beside_batches_are_refused(kind, beside):
    """They would be left out without a word."""
    if kind == "a dataset":
        batches = tf.data.Dataset.from_tensors((X, Y))
    else:
        batches = data.PoissonBatches(X, Y, batch_size=EXAMPLES)
    model = private(linear(), exact())
    with pytest.raises(ValueError, match="Expected y=None and sample_weight"):
        model.fit(batches, **beside, verbose=0)
    assert model.ledger.steps == 0


def test_a_batch_of_a_dataset_may_be_large():
    """Sums of more than 4,096 examples have no limit."""
    examples = 5000
    model = private(linear(), dpsgd(batch_size=examples))
    x, y = (np.resize(a, (examples, *a.shape[1:])) for a in (X, Y))
    model.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
    assert model.ledger.steps == 1


def test_the_sum_of_rates_is_in_no_message():
    """It follows from private data where the rates do."""
    x, y = np.repeat(X, 400, axis=0), np.repeat(Y, 400)
    rates = np.full(len(x), 0.987)
    batches = data.PoissonBatches(x, y, batch_size=1, sampling_rates=rates)
    model = private(linear(), dpsgd(batch_size=1, **EXACT))
    with pytest.raises(ValueError, match="which is private") as raised:
        model.fit(batches, verbose=0)
    assert f"{rates.sum():.0f}"[:3] not in str(raised.value)
