"""Simulated heads do what the real ones do."""

import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import heads
from tf_dpsub.planning import representations, simulated_heads


@pytest.fixture(scope="module")
def examples():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 60)
    x = np.eye(3)[labels] + generator.standard_normal((60, 3))
    return np.tile(x, 3).astype("float32"), labels


def _run(examples, epsilon):
    return heads.FullBatch(examples, epsilon, 1e-5, steps=3, learning_rate=2.0)


def test_without_noise_it_is_the_private_head(examples):
    x, y = examples
    head = _run(len(x), 8.0)
    head.noise_multiplier = 0.0
    model = tf_dpsub.make_private(
        tf_dpsub.models.feature_classifier(
            tf_dpsub.models.vector_features(1.01 * x), 3
        )
    )
    model.compile(
        head.optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, epochs=head.steps, verbose=0)
    features = model.model.layers[1](x).numpy()
    kernel = simulated_heads.full_batch(
        features, y, np.zeros((9, 3)), head, np.random.default_rng(0)
    )
    # The private clip leaves a share for rounding.
    np.testing.assert_allclose(
        kernel, model.trainable_variables[0], rtol=2e-3, atol=1e-5
    )


def test_noise_is_that_of_all_private_examples(examples):
    """Of 60 that stand for n, as of one step with n."""
    x, y = examples
    for n in (1000, 4000):
        head = heads.FullBatch(n, 1.0, 1e-5, steps=1, learning_rate=1.0)
        head.momentum = 0.0
        exact = heads.FullBatch(n, 1.0, 1e-5, steps=1, learning_rate=1.0)
        exact.momentum, exact.noise_multiplier = 0.0, 0.0
        start = np.zeros((9, 3))
        differences = [
            simulated_heads.full_batch(
                x, y, start, head, np.random.default_rng(seed)
            )
            - simulated_heads.full_batch(
                x, y, start, exact, np.random.default_rng(seed)
            )
            for seed in range(100)
        ]
        # Rate and noise are in units of the clip; 2,700 draws.
        assert np.std(differences) == pytest.approx(head.noise, rel=0.06)


def test_heads_that_are_trained_at_once_do_not_disturb_each_other(examples):
    x, y = examples
    start = np.zeros((9, 3))
    settings = [(2, 1.0, 0.1), (5, 2.0, 0.1), (3, 1.0, 0.05)]
    several = [
        heads.FullBatch(
            1000,
            1.0,
            1e-5,
            steps=steps,
            learning_rate=rate,
            l2_norm_clip=clip,
        )
        for steps, rate, clip in settings
    ]

    def generators():
        return [np.random.default_rng(seed) for seed in range(len(several))]

    kernels = simulated_heads.full_batches(x, y, start, several, generators())
    for kernel, head, generator in zip(kernels, several, generators()):
        np.testing.assert_allclose(
            kernel,
            simulated_heads.full_batch(x, y, start, head, generator),
            rtol=1e-4,
            atol=1e-5,
        )


def test_ridge_is_that_of_the_private_solver(examples):
    x, y = examples
    features = x / np.median(np.linalg.norm(x, axis=1))
    kernel = simulated_heads.private_ridge(features, y, 3, 0.0, 0)
    right = simulated_heads.is_right(kernel, features, y)
    noisy = simulated_heads.private_ridge(features, y, 3, 1e3, 0)
    assert right.mean() > 0.6
    assert simulated_heads.is_right(noisy, features, y).mean() < right.mean()


def test_scales_are_those_of_the_layer():
    """Directions of coordinates are those of features."""
    generator = np.random.default_rng(0)
    public = generator.standard_normal((20, 30)) * np.linspace(1, 4, 30)
    public = public.astype("float32")
    scales = representations.Scales(public, 8)
    for rank, whiten in [(8, 1.0), (3, 0.5), (5, 0.0)]:
        layer = tf_dpsub.layers.PublicProjection.from_features(
            public, rank, whiten=whiten
        )
        expected = layer(public).numpy()
        found = scales.function(rank, whiten)(public)
        # Signs of directions are of no account.
        np.testing.assert_allclose(
            np.abs(found), np.abs(expected), rtol=1e-3, atol=1e-4
        )
