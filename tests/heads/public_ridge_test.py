import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub.heads import fit_public_ridge

_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _classifier(classes=3, size=5, use_bias=False):
    return tf_dpsub.models.feature_classifier(
        keras.layers.Rescaling(1.0), classes, (size,), use_bias=use_bias
    )


def _data(count=40, size=5, classes=3, seed=0, noise=0.6):
    """Classes around centres of their own."""
    generator = np.random.default_rng(seed)
    y = np.arange(count) % classes
    centres = np.random.default_rng(9).standard_normal((classes, size))
    x = centres[y] + noise * generator.standard_normal((count, size))
    return x.astype("float32"), y


def _solution(x, y, regularization, classes=3):
    """Ridge regression as textbooks have it."""
    x = x.astype("float64")
    moments = x.T @ x
    penalty = regularization * np.linalg.eigvalsh(moments)[-1]
    targets = np.eye(classes)[y] - 1 / classes
    return np.linalg.solve(
        moments + penalty * np.eye(len(moments)), x.T @ targets
    )


@pytest.mark.parametrize("count", [4, 40])
def test_solution(count):
    """With fewer examples than features, and with more."""
    x, y = _data(count)
    plain = _classifier(use_bias=True)
    plain.layers[-1].bias.assign([1.0, 2.0, 3.0])
    result = fit_public_ridge(plain, x, y, regularization=0.03, scale=7.0)
    kernel, bias = plain.get_weights()[-2:]
    np.testing.assert_allclose(kernel, 7 * _solution(x, y, 0.03), rtol=1e-4)
    np.testing.assert_array_equal(bias, 0)
    assert result.regularization == 0.03


def test_chosen_regularization_has_the_least_error_on_what_is_left_out():
    x, y = _data(noise=2.0)
    # Targets that hardly depend on the features want much of it, exact ones
    # little.
    for noise, bounds in [(8.0, (0.02, 11)), (0.01, (0, 1e-4))]:
        x, y = _data(noise=noise)
        result = fit_public_ridge(_classifier(), x, y)
        largest = np.linalg.eigvalsh(x.T @ x)[-1]
        errors, right = [], []
        for factor in (0.1, 1.0, 10.0):
            regularization = result.regularization * factor
            outputs = []
            for i in range(len(x)):
                others = np.arange(len(x)) != i
                own = np.linalg.eigvalsh(x[others].T @ x[others])[-1]
                kernel = _solution(
                    x[others], y[others], regularization * largest / own
                )
                outputs.append(x[i] @ kernel)
            errors.append(np.sum((outputs - np.eye(3)[y] + 1 / 3) ** 2))
            right.append(np.mean(np.argmax(outputs, 1) == y))
        # The grid ends at 1e-5 and 10.
        assert errors[1] <= min(errors) * (1 + 1e-3)
        assert bounds[0] <= result.regularization <= bounds[1]
        assert result.leave_one_out_accuracy == pytest.approx(right[1])


def test_private_training_goes_on_from_it_and_names_the_examples():
    x, y = _data(300, seed=1)
    plain = _classifier()
    fit_public_ridge(plain, *_data())
    kernel = plain.get_weights()[-1]
    model = tf_dpsub.make_private(plain)
    np.testing.assert_array_equal(model.get_weights()[-1], kernel)
    head = tf_dpsub.heads.FullBatch(300, 1.0, 1e-5, steps=1, public_start=True)
    model.compile(head.optimizer(seed=0), _LOSS)
    model.fit(x, y, verbose=0)
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert (
        "40 examples that the head was started from (none equals a private one)"
        in statement
    )


def test_private_examples_among_them_raise():
    x, y = _data()
    for allow in (False, True):
        plain = _classifier()
        fit_public_ridge(plain, x, y, allow_private=allow)
        model = tf_dpsub.make_private(plain)
        ridge = tf_dpsub.heads.PrivateRidge(noise_multiplier=1.0)
        if not allow:
            with pytest.raises(ValueError, match="the head was started from"):
                ridge.fit(model, x[:3], y[:3])
            assert model.ledger.steps == 0
            continue
        ridge.fit(model, x[:3], y[:3])
        statement = " ".join(model.privacy_statement(1e-5).split())
        assert "private examples that the head was started from" in statement


def test_layers_between_features_and_head_count():
    """The head is fitted to what it is given, in inference."""
    inputs = keras.Input((5,))
    noisy = keras.layers.GaussianNoise(1.0)(inputs)
    frozen = tf_dpsub.layers.FrozenFeatures(keras.layers.Rescaling(1.0))
    hidden = keras.layers.Activation("tanh")(frozen(noisy))
    plain = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    x, y = _data()
    fit_public_ridge(plain, x, y, regularization=0.1, scale=1.0)
    np.testing.assert_allclose(
        plain.get_weights()[-2],
        _solution(np.tanh(x), y, 0.1),
        rtol=1e-3,
        atol=1e-6,
    )


_X, _Y = _data(6)
_BROKEN = _X.copy()
_BROKEN[2, 1] = np.nan


@pytest.mark.parametrize(
    "x, y, arguments, message",
    [
        (_X, None, {}, "y=None"),
        (_X, _Y[:5], {}, "got 6 and 5"),
        (_X[:0], _Y[:0], {}, "at least one"),
        (_X, _Y + 1, {}, "from 0 to 2, got some from 1 to 3"),
        (_X, _Y - 1, {}, "got some from -1"),
        (_X, _Y.astype("float32"), {}, "integers, got float32"),
        (_X, np.eye(3)[_Y], {}, "integers, got float64"),
        (_BROKEN, _Y, {}, "1 of 6 with others"),
        (0 * _X, _Y, {}, "not all zero"),
        (_X, _Y, {"regularization": 0.0}, "regularization > 0"),
        (_X, _Y, {"scale": -1.0}, "scale > 0"),
    ],
)
def test_errors(x, y, arguments, message):
    plain = _classifier()
    with pytest.raises(ValueError, match=message):
        fit_public_ridge(plain, x, y, **arguments)
    np.testing.assert_array_equal(plain.get_weights()[-1], 0)


def test_other_models_raise():
    plain = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="feature_classifier"):
        fit_public_ridge(plain, _X, _Y)


def test_private_models_raise():
    model = tf_dpsub.make_private(_classifier())
    with pytest.raises(ValueError, match="before `make_private`"):
        fit_public_ridge(model, _X, _Y)
