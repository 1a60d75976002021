"""DP-PowerSGD: the low-rank part of DP-SGD's release is applied."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub.optimizers import DPSGD, DPPowerSGD
from tf_dpsub.optimizers.dp_powersgd import matrix_shape

BATCH = 12

_random = np.random.default_rng(0)
X = _random.normal(size=(BATCH, 6, 6, 2)).astype("float32")
Y = _random.integers(0, 5, BATCH)


def network():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input(X.shape[1:]),
            keras.layers.Conv2D(6, 3, activation="tanh", name="convolution"),
            keras.layers.Flatten(),
            keras.layers.Dense(20, "tanh", name="hidden"),
            keras.layers.Dense(5, name="logits"),
        ]
    )


def optimizer(cls=DPPowerSGD, **arguments):
    defaults = {
        "noise_multiplier": 0.0,
        "l2_norm_clip": 0.5,
        "batch_size": BATCH,
        "seed": 0,
    }
    if cls is DPPowerSGD:
        defaults["rank"] = 5
    return cls(keras.optimizers.SGD(1.0), **{**defaults, **arguments})


def private(optimizer):
    model = tf_dpsub.make_private(network())
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def step(model):
    before = model.get_weights()
    model.train_on_batch(X, Y)
    return [a - b for a, b in zip(before, model.get_weights())]


def test_a_gradient_of_that_rank_stays_what_it_is():
    """Gradients of the last kernel have rank five, one for each logit."""
    expected = step(private(optimizer(DPSGD)))
    found = step(private(optimizer()))
    for a, b in zip(found, expected):
        if min(matrix_shape(a.shape)) <= 5:
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3])
def test_gradients_have_the_rank(rank):
    expected = step(private(optimizer(DPSGD)))
    found = step(private(optimizer(rank=rank)))
    for a, b in zip(found, expected):
        if a.ndim == 1:
            np.testing.assert_allclose(a, b, atol=1e-6)
            continue
        shape = matrix_shape(a.shape)
        spectrum = np.linalg.svd(a.reshape(shape), compute_uv=False)
        assert spectrum[rank:].max() < 1e-5 * spectrum[0]
        # A projection of the gradient from the left.
        left = np.linalg.svd(a.reshape(shape))[0][:, :rank]
        projected = left @ left.T @ b.reshape(shape)
        np.testing.assert_allclose(a.reshape(shape), projected, atol=1e-5)


def test_keeps_the_largest_directions_once_it_is_warm():
    model = private(optimizer(rank=2))
    model.optimizer.build_for(model)
    gradient = _random.normal(size=(96, 20)) * np.linspace(2, 0, 20)
    u, s, v = np.linalg.svd(gradient, full_matrices=False)
    best = (u[:, :2] * s[:2]) @ v[:2]
    index = [v.shape for v in model.trainable_variables].index((96, 20))
    sums = [tf.zeros(v.shape) for v in model.trainable_variables]
    sums[index] = tf.constant(BATCH * gradient, tf.float32)
    errors = []
    for _ in range(60):
        found = model.optimizer.privatize(sums)
        errors.append(np.linalg.norm(found[index] - best))
    assert errors[-1] < 0.01 * errors[0]
    for k, other in enumerate(found):
        assert k == index or not np.any(other)


def test_survives_a_gradient_of_zero():
    model = private(optimizer(rank=2))
    model.optimizer.build_for(model)
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    for _ in range(2):
        for found in model.optimizer.privatize(zeros):
            assert not np.any(found)
    ones = [tf.ones(v.shape) for v in model.trainable_variables]
    for found in model.optimizer.privatize(ones):
        np.testing.assert_allclose(found, 1 / BATCH, rtol=1e-4)


def test_releases_and_accounts_for_what_dpsgd_does():
    models = [
        private(optimizer(cls, noise_multiplier=1.3, batch_size=4))
        for cls in (DPSGD, DPPowerSGD)
    ]
    for model in models:
        model.fit(X, Y, epochs=2, verbose=0)
    assert models[0].epsilon(1e-5) == models[1].epsilon(1e-5) > 0
    shapes = [model.optimizer.sum_shapes() for model in models]
    assert shapes[0] == shapes[1]
    assert "DPPowerSGD of rank 5" in models[1].privacy_statement(1e-5)


def test_a_resumed_run_goes_on_as_it_would_have(tmp_path):
    model = private(optimizer(rank=2))
    for _ in range(2):
        model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    model.train_on_batch(X, Y)
    resumed = keras.saving.load_model(tmp_path / "model.keras")
    assert resumed.optimizer.rank == 2
    resumed.train_on_batch(X, Y)
    for a, b in zip(resumed.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((7,), (7, 1)),
        ((), (1, 1)),
        ((3, 20), (3, 20)),
        ((3, 3, 64, 64), (576, 64)),
        ((384, 12, 32), (384, 384)),
        ((12, 32, 384), (384, 384)),
    ],
)
def test_kernels_as_matrices(shape, expected):
    assert matrix_shape(shape) == expected


@pytest.mark.parametrize("rank", [0, -1, 2.5])
def test_invalid_rank(rank):
    with pytest.raises(ValueError, match="Expected rank >= 1"):
        optimizer(rank=rank)
