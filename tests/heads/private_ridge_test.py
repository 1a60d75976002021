import copy
import math
import os
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tf_dpsub
from tf_dpsub.heads import PrivateRidge
from tf_dpsub.primitives import grid
from tf_dpsub.training import workers


def _classifier(classes=3, size=4, use_bias=False):
    return tf_dpsub.models.feature_classifier(
        keras.layers.Rescaling(1.0), classes, (size,), use_bias=use_bias
    )


def _data(count, size=4, classes=3, seed=0):
    """Classes around centres of their own."""
    generator = np.random.default_rng(seed)
    y = generator.integers(classes, size=count)
    centres = np.random.default_rng(1).standard_normal((classes, size))
    x = centres[y] + 0.3 * generator.standard_normal((count, size))
    return (x / 2).astype("float32"), y


def _norms():
    """Features of all kinds of norms, and labels."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((40, 5)).astype("float32")
    scales = np.repeat(
        np.float32([1e-30, 1e-5, 0.5, 1.0, 3.0, 1e18, 3e38, np.inf]), 5
    )
    with np.errstate(over="ignore"):
        x *= scales[:, None]
    x[-1] = np.nan
    x[-2] = [1e38, -1e38, np.nan, 0, 0]
    return x, generator.integers(-2, 6, 40)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("radius", [1e-3, 1.0, 100.0])
def test_contribution_of_an_example(share, radius):
    ridge = PrivateRidge(noise_multiplier=1.0, share=share, radius=radius)
    x, y = _norms()
    total = ridge._sums(x, y, 4)
    assert np.isfinite(total).all()
    for i in range(len(x)):
        contribution = ridge._contributions(x[i : i + 1], y[i : i + 1], 4)
        assert np.linalg.norm(contribution) <= 1 - 2**-12
        without = ridge._sums(np.delete(x, i, 0), np.delete(y, i), 4)
        assert np.linalg.norm(total - without) <= 1 - 2**-12
        if not (0 <= y[i] < 4 and np.isfinite(x[i]).all()):
            np.testing.assert_array_equal(contribution, 0)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_bound_is_reached(share):
    """The noise is not larger than a contribution needs."""
    ridge = PrivateRidge(noise_multiplier=1.0, share=share)
    x = np.float32([[3.0, 4.0]])
    contribution = ridge._contributions(x, np.array([1]), 5)
    assert np.linalg.norm(contribution) == pytest.approx(1, abs=1e-3)


def test_noise():
    """Noise of each number of what is released: its law, and independence."""
    sigma, rank, classes = 3.0, 6, 2
    ridge = PrivateRidge(noise_multiplier=sigma, share=0.3, seed=0)
    zeros = np.zeros(rank * (rank + 1) // 2 + rank * classes)
    draws = []
    for _ in range(400):
        moments, products = ridge._released(zeros, rank, classes)
        np.testing.assert_array_equal(moments, moments.T)
        upper = np.triu_indices(rank, 1)
        draws.append(
            np.concatenate(
                [
                    math.sqrt(0.3) * np.diag(moments),
                    math.sqrt(0.6) * moments[upper],
                    math.sqrt(0.7 / 0.5) * products.ravel(),
                ]
            )
        )
    draws = np.array(draws) / sigma  # [releases, numbers]
    # All draws have one law: with the seed nothing is left to chance.
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    deviations = draws.std(0)
    assert 0.85 < deviations.min() and deviations.max() < 1.15
    correlations = np.corrcoef(draws.T) - np.eye(draws.shape[1])
    assert np.abs(correlations).max() < 0.3


def test_released_numbers_lie_on_a_grid():
    """The low bits of what is released tell nothing of the sum."""
    ridge = PrivateRidge(noise_multiplier=2.0, share=0.25, seed=0)
    sums = np.random.default_rng(0).standard_normal(7) / 3
    moments, _ = ridge._released(sums, 2, 2)
    spacing = grid.spacing(2.0, 1.0, len(sums))
    # The diagonal is divided by the root of the share, a half: exactly.
    multiples = np.diag(moments) / 2 / spacing
    np.testing.assert_array_equal(multiples, np.round(multiples))


def test_without_noise_it_is_ridge_regression():
    x, y = _data(300)
    ridge = PrivateRidge(noise_multiplier=0.0, scale=1.0, radius=100.0)
    model = tf_dpsub.make_private(_classifier())
    ridge.fit(model, x, y)
    targets = np.eye(3)[y] - 1 / 3
    expected = np.linalg.lstsq(x.astype("float64"), targets, rcond=None)[0]
    np.testing.assert_allclose(model.get_weights()[-1], expected, atol=2e-3)
    assert model.epsilon(1e-5) == math.inf


def test_it_learns_and_is_accounted_for():
    x, y = _data(20_000)
    model = tf_dpsub.make_private(_classifier())
    PrivateRidge(epsilon=1.0, delta=1e-5, seed=0).fit(model, x, y)
    exact = np.linalg.lstsq(x, np.eye(3)[y], rcond=None)[0]
    best = np.mean((x @ exact).argmax(1) == y)
    outputs = model.predict(x, verbose=0)
    assert np.mean(outputs.argmax(1) == y) > best - 0.02
    assert 0.99 < model.epsilon(1e-5, "pld") <= 1.0
    (entry,) = model.ledger.entries
    assert (entry.mechanism, entry.steps) == ("PrivateRidge", 1)
    assert (entry.sampler, entry.examples) == ("batches", 20_000)
    assert "outside of private training" not in model.privacy_statement(1e-5)


def test_training_goes_on_from_it():
    x, y = _data(500)
    model = tf_dpsub.make_private(_classifier())
    PrivateRidge(noise_multiplier=5.0, seed=0).fit(model, x, y)
    model.compile(
        tf_dpsub.heads.FullBatch(500, 1.0, 1e-5, steps=2).optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, epochs=2, verbose=0)
    assert [e.mechanism for e in model.ledger.entries] == [
        "PrivateRidge",
        "DPSGD",
    ]
    assert model.epsilon(1e-5, "pld") > 1.0


def test_two_releases_compose():
    x, y = _data(500)
    model = tf_dpsub.make_private(_classifier())
    ridge = PrivateRidge(noise_multiplier=5.0)
    ridge.fit(model, x, y)
    first = model.epsilon(1e-5)
    kernel = model.get_weights()[-1]
    ridge.fit(model, x, y)
    assert model.epsilon(1e-5) > 1.2 * first
    assert np.abs(model.get_weights()[-1] - kernel).max() > 0


def test_bias_is_zero():
    x, y = _data(500)
    model = tf_dpsub.make_private(_classifier(use_bias=True))
    model.model.layers[-1].bias.assign([1.0, 2.0, 3.0])
    PrivateRidge(noise_multiplier=5.0).fit(model, x, y)
    np.testing.assert_array_equal(model.model.layers[-1].bias, 0)


def test_augmentation_before_the_features_is_off():
    x, y = _data(300)
    kernels = []
    for augmented in (False, True):
        inputs = between = keras.Input((4,))
        if augmented:
            between = keras.layers.GaussianNoise(1.0)(inputs)
        frozen = tf_dpsub.layers.FrozenFeatures(keras.layers.Rescaling(1.0))
        plain = keras.Model(inputs, keras.layers.Dense(3)(frozen(between)))
        PrivateRidge(noise_multiplier=0.0).fit(
            tf_dpsub.make_private(plain), x, y
        )
        kernels.append(plain.layers[-1].kernel.numpy())
    np.testing.assert_array_equal(*kernels)


def test_public_start_is_stated():
    x, y = _data(500)
    plain = _classifier()
    tf_dpsub.fit_public(plain, x[:20] + 1, y[:20], steps=2)
    model = tf_dpsub.make_private(plain)
    PrivateRidge(noise_multiplier=5.0).fit(model, x, y)
    assert "20 examples that the weights were trained on" in " ".join(
        model.privacy_statement(1e-5).split()
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "either noise_multiplier or epsilon"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "either"),
        ({"epsilon": 1.0}, "delta with epsilon"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": 1.0, "radius": 0.0}, "radius >= 1e-12"),
        ({"noise_multiplier": 1.0, "radius": 1e-320}, "radius >= 1e-12"),
        ({"noise_multiplier": 1.0, "share": 1.0}, "share < 1"),
        ({"noise_multiplier": 1.0, "regularization": 0.0}, "regularization"),
        ({"noise_multiplier": 1.0, "scale": -1.0}, "scale > 0"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivateRidge(**arguments)


def test_other_models_raise():
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = tf_dpsub.make_private(plain)
    with pytest.raises(ValueError, match="feature_classifier"):
        PrivateRidge(noise_multiplier=1.0).fit(model, *_data(10))
    assert model.ledger.steps == 0


def test_another_number_of_labels():
    model = tf_dpsub.make_private(_classifier())
    x, y = _data(10)
    with pytest.raises(ValueError, match="each of 10 examples, got 9"):
        PrivateRidge(noise_multiplier=1.0).fit(model, x, y[:9])
    assert model.ledger.steps == 0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda ridge: pickle.loads(pickle.dumps(ridge))]
)
def test_a_copy_draws_other_noise(copied):
    """With the same noise, two releases would tell their difference."""
    ridge = PrivateRidge(noise_multiplier=1.0)
    zeros = np.zeros(12)
    (first, _), (second, _) = (
        r._released(zeros, 3, 2) for r in (copied(ridge), ridge)
    )
    assert (first != second).all()


def _tokens(ids, count=30):
    """A classifier of embedded tokens, with one example out of range."""
    inputs = keras.Input((2,), dtype="int32")
    embedded = keras.layers.Embedding(9, 4)(inputs)
    outputs = keras.layers.GlobalAveragePooling1D()(embedded)
    features = keras.Model(inputs, outputs)
    x = np.random.default_rng(0).integers(9, size=(count, 2))
    x[7] = ids
    model = tf_dpsub.models.feature_classifier(features, 3)
    return tf_dpsub.make_private(model), x.astype("int32"), np.arange(count) % 3


def test_an_id_out_of_range_contributes_nothing():
    kernels = []
    for leave_out in (False, True):
        keras.utils.set_random_seed(0)
        model, x, y = _tokens([3, 4711])
        if leave_out:
            x, y = np.delete(x, 7, 0), np.delete(y, 7)
        PrivateRidge(noise_multiplier=0.0).fit(model, x, y)
        kernels.append(model.get_weights()[-1])
    np.testing.assert_allclose(*kernels, rtol=1e-9)


def test_errors_quote_no_private_values():
    class Refuses(keras.layers.Layer):
        def call(self, inputs):
            with tf.control_dependencies(
                [tf.debugging.assert_less(inputs, 50.0)]
            ):
                return tf.identity(inputs)

    model = tf_dpsub.make_private(
        tf_dpsub.models.feature_classifier(Refuses(), 3, (4,))
    )
    x, y = _data(10)
    x[3] = 4711.25
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        PrivateRidge(noise_multiplier=1.0).fit(model, x, y)
    assert "4711" not in str(raised.value)


def test_python_functions_are_stated():
    class Python(keras.layers.Layer):
        def call(self, inputs):
            outputs = tf.numpy_function(np.tanh, [inputs], tf.float32)
            outputs.set_shape(inputs.shape)
            return outputs

    model = tf_dpsub.make_private(
        tf_dpsub.models.feature_classifier(Python(), 3, (4,))
    )
    PrivateRidge(noise_multiplier=5.0).fit(model, *_data(20))
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert "what Python functions of the features keep" in statement


@pytest.mark.parametrize("labels", ["float32", "one-hot"])
def test_labels_that_are_no_integers(labels):
    model = tf_dpsub.make_private(_classifier())
    x, y = _data(10)
    y = np.eye(3)[y] if labels == "one-hot" else y.astype(labels)
    with pytest.raises(ValueError, match="labels that are integers"):
        PrivateRidge(noise_multiplier=1.0).fit(model, x, y)
    assert model.ledger.steps == 0


def test_several_workers_raise(monkeypatch):
    """Each would make a release, and the ledger would count one."""
    monkeypatch.setattr(workers, "is_one_of_several", lambda strategy: True)
    model = tf_dpsub.make_private(_classifier())
    with pytest.raises(ValueError, match="one process"):
        PrivateRidge(noise_multiplier=1.0).fit(model, *_data(10))
    assert model.ledger.steps == 0


def test_refused_uncharged_during_fit_or_in_a_fork(monkeypatch):
    model = tf_dpsub.make_private(_classifier())
    x, y = _data(12)
    ridge = PrivateRidge(noise_multiplier=1.0)
    monkeypatch.setattr(model, "current_run", object())
    with pytest.raises(RuntimeError, match="no call of `fit` in progress"):
        ridge.fit(model, x, y)
    monkeypatch.setattr(model, "current_run", None)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="forked from it"):
        ridge.fit(model, x, y)
    assert model.ledger.entries == ()
