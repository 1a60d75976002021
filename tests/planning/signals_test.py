"""Signals of mechanisms, against per-example gradients that are written out."""

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub import layers, optimizers, subspaces
from tf_dpsub.planning.signals import Signal, SignalMeter, mean_signal

INPUTS, DIRECTIONS, BATCHES, SIZE = 400, 100, 4, 3
CLIP, RESIDUAL_CLIP, BATCH_SIZE = 0.5, 0.2, 40
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(BATCHES, SIZE, INPUTS)).astype("float32")
Y = GENERATOR.normal(1, 1, size=(BATCHES, SIZE, 1)).astype("float32")
BASIS = np.linalg.qr(GENERATOR.normal(size=(INPUTS, DIRECTIONS)))[0].astype(
    "float32"
)
SIGNAL = Signal(gradient=4.0, common=2.0, released=1.0, example=9.0, noise=50.0)


def linear_model():
    model = keras.Sequential(
        [keras.Input([INPUTS]), keras.layers.Dense(1, use_bias=False)]
    )
    weights = np.linspace(-1, 1, INPUTS, dtype="float32")
    model.set_weights([weights[:, None]])
    return model


def batches():
    return [{"x": tf.constant(x), "y": tf.constant(y)} for x, y in zip(X, Y)]


def rows():
    """Gradients of (w x - y)^2, `[batches, size, inputs]`."""
    (weights,) = linear_model().get_weights()
    return 2 * (X @ weights - Y) * X


def clipped(vectors, norm):
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1, norm / norms)


def measured(make, **kwargs):
    """The signal of one optimizer, whose noise multiplier is 1."""
    model = linear_model()
    if make is optimizers.RGP:
        layers.reparametrize(model, 1)
    optimizer = make(
        "sgd",
        noise_multiplier=1.0,
        batch_size=BATCH_SIZE,
        **{"l2_norm_clip": CLIP} | kwargs,
    )
    meter = SignalMeter(model, "mse", [optimizer], batches())
    gradients = [[tf.constant(g.mean(0)[:, None], tf.float32)] for g in rows()]
    (signal,) = meter.measure(gradients)
    return signal


def expected(released):
    """Products of different batches, from what is released of examples."""
    means, gradients = released.mean(1), rows().mean(1)

    def product(a, b):
        pairs = [
            a[i] @ b[j]
            for i in range(BATCHES)
            for j in range(BATCHES)
            if i != j
        ]
        return np.mean(pairs)

    return {
        "gradient": product(gradients, gradients),
        "common": product(means, gradients),
        "released": product(means, means),
    }


def check(signal, released, noise, rtol):
    energies = {
        "gradient": np.sum(rows() ** 2) / (BATCHES * SIZE),
        "released": np.sum(released**2) / (BATCHES * SIZE),
    }
    energies["common"] = math.sqrt(energies["gradient"] * energies["released"])
    for name, value in expected(released).items():
        # The clip keeps 2^-10 for rounding.
        error = 3e-3 * float(energies[name])
        assert getattr(signal, name) == pytest.approx(value, abs=error), name
    # Of one example, from how much the means of batches differ.
    of_batch = np.mean(np.sum(released.mean(1) ** 2, 1))
    common = expected(released)["released"]
    assert signal.example == pytest.approx(
        float(SIZE * (of_batch - common) + common), rel=5e-3
    )
    assert signal.noise == pytest.approx(noise, rel=rtol)


def test_dp_sgd():
    signal = measured(optimizers.DPSGD)
    check(signal, clipped(rows(), CLIP), CLIP**2 * INPUTS, 0.2)


def test_projected():
    signal = measured(
        optimizers.ProjectedDPSGD, subspace=subspaces.FixedSubspace(BASIS)
    )
    inside = clipped(rows(), CLIP) @ BASIS @ BASIS.T
    check(signal, inside, CLIP**2 * DIRECTIONS, 0.4)


def test_gep_counts_its_two_releases_as_one():
    """At effective multiplier 1 each has noise of multiplier sqrt(2)."""
    signal = measured(
        optimizers.GEP,
        subspace=subspaces.FixedSubspace(BASIS),
        residual_norm_clip=RESIDUAL_CLIP,
    )
    inside = rows() @ BASIS
    outside = rows() - inside @ BASIS.T
    released = clipped(inside, CLIP) @ BASIS.T + clipped(outside, RESIDUAL_CLIP)
    noise = 2 * (CLIP**2 * DIRECTIONS + RESIDUAL_CLIP**2 * INPUTS)
    check(signal, released, noise, 0.3)


def test_carriers_of_full_rank_keep_the_gradient():
    """A kernel with one column has rank 1: nothing is lost."""
    signal = measured(optimizers.RGP, l2_norm_clip=1e6)
    check(signal, rows(), 1e12 * INPUTS, 0.2)


def test_noise_of_many_weights_is_exact():
    model = keras.Sequential(
        [keras.Input([300]), keras.layers.Dense(40, use_bias=False)]
    )
    optimizer = optimizers.DPSGD(
        "sgd", noise_multiplier=2.0, l2_norm_clip=3.0, batch_size=7
    )
    part = {"x": tf.zeros([2, 300]), "y": tf.ones([2, 40])}
    meter = SignalMeter(model, "mse", [optimizer], [part, part])
    nothing = [[tf.zeros([300, 40])]] * 2
    (signal,) = meter.measure(nothing)
    assert signal.noise == pytest.approx(9 * 12_000, rel=0.03)
    assert signal.released == 0


def test_weights_do_not_change():
    model = linear_model()
    before = model.get_weights()[0].copy()
    optimizer = optimizers.DPSGD(
        "sgd", noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=2
    )
    meter = SignalMeter(model, "mse", [optimizer], batches())
    meter.measure(meter.means()[0])
    np.testing.assert_array_equal(model.get_weights()[0], before)


class TestSignal:
    def test_energies(self):
        assert SIGNAL.noise_energy(3.0, 10) == pytest.approx(50 * 0.09)
        assert SIGNAL.snr(3.0, 10) == pytest.approx(1 / 4.5)
        assert SIGNAL.snr(0.0, 10) == math.inf

    def test_alignment(self):
        """2 / (2 sqrt(1 + (8 / 10 + 4.5) / 5))"""
        cosine = SIGNAL.alignment(3.0, 10, 5)
        assert cosine == pytest.approx(1 / math.sqrt(1 + 5.3 / 5))
        assert SIGNAL.alignment(3.0, 10, 10**9) == pytest.approx(1.0)

    @pytest.mark.parametrize("changes", [{"gradient": -1.0}, {"common": -1.0}])
    def test_nothing_in_common_is_zero(self, changes):
        signal = dataclasses.replace(SIGNAL, **changes)
        assert signal.alignment(1.0, 10, 5) == 0

    def test_mean(self):
        other = dataclasses.replace(SIGNAL, gradient=8.0, noise=0.0)
        mean = mean_signal([SIGNAL, other])
        assert (mean.gradient, mean.noise, mean.common) == (6.0, 25.0, 2.0)
