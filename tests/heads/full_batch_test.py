import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import accounting
from tf_dpsub.heads import FullBatch


def test_noise_keeps_the_budget():
    head = FullBatch(1000, epsilon=0.7, delta=1e-5, steps=30)
    spent = accounting.epsilon(
        noise_multiplier=head.noise_multiplier,
        sampling_rate=1.0,
        steps=30,
        delta=1e-5,
        accountant="pld",
    )
    assert 0.999 * 0.7 < spent <= 0.7


def test_rule():
    """More examples, or a larger budget, bring a larger rate and more steps."""
    heads = [
        FullBatch(examples, epsilon=epsilon, delta=1e-5)
        for examples, epsilon in [(1000, 0.2), (10_000, 0.2), (60_000, 3.0)]
    ]
    assert [head.steps for head in heads] == [60, 60, 100]
    rates = [head.learning_rate for head in heads]
    assert rates[1] == pytest.approx(10 * rates[0])
    assert rates[2] > 20 * rates[1]


def test_a_public_start_halves_the_rate():
    zero, start = (
        FullBatch(1000, epsilon=1.0, delta=1e-5, public_start=public_start)
        for public_start in (False, True)
    )
    assert start.learning_rate == zero.learning_rate / 2
    assert start.noise_multiplier == zero.noise_multiplier
    given = FullBatch(1000, 1.0, 1e-5, learning_rate=3.0, public_start=True)
    assert given.learning_rate == 3.0


def test_given_settings_stay():
    head = FullBatch(
        1000, epsilon=1.0, delta=1e-5, steps=7, learning_rate=3.0, momentum=0.5
    )
    optimizer = head.optimizer(seed=1, microbatch_size=64)
    assert head.steps == 7
    assert float(optimizer.inner_optimizer.learning_rate) == pytest.approx(30)
    assert optimizer.inner_optimizer.momentum == 0.5
    assert (optimizer.batch_size, optimizer.seed) == (1000, 1)
    assert optimizer.microbatch_size == 64


def test_head_learns():
    """Two classes that a linear head separates, at epsilon 1."""
    generator = np.random.default_rng(0)
    y = generator.integers(2, size=2000)
    x = generator.standard_normal((2000, 5)) * 0.3
    x[:, 0] += y - 0.5
    head = FullBatch(len(x), epsilon=1.0, delta=1e-5, steps=20)
    model = tf_dpsub.make_private(
        tf_dpsub.models.feature_classifier(keras.layers.Rescaling(1.0), 2, (5,))
    )
    model.compile(
        head.optimizer(seed=0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(x, y, epochs=head.steps, verbose=0)
    # Of a perfect direction, 95.2 % are right.
    assert model.evaluate(x, y, verbose=0)[1] > 0.9
    assert 0.99 < model.epsilon(1e-5, "pld") <= 1.0
    assert model.ledger.steps == 20


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"examples": 0}, "examples >= 1"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"steps": 0}, "steps >= 1"),
        ({"learning_rate": -1.0}, "learning_rate > 0"),
        ({"l2_norm_clip": 0.0}, "l2_norm_clip > 0"),
        ({"momentum": 1.0}, "momentum < 1"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        FullBatch(
            **{"examples": 100, "epsilon": 1.0, "delta": 1e-5} | arguments
        )
