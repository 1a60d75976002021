import math

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tf_dpsub
from tf_dpsub.primitives import grid
from tf_dpsub.training import workers
from tf_dpsub.training.private_evaluation import PrivateEvaluation

BOTH = {"accuracy": 1.0, "loss": 3.0}


def _private(plain, loss="crossentropy"):
    if loss == "crossentropy":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            "sgd", noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=8
        ),
        loss,
    )
    return model


@pytest.fixture(scope="module")
def model():
    return _private(tf_dpsub.models.mlp((4,), (8,), 3))


@pytest.fixture
def ledger(model):
    """The ledger of the model, empty."""
    model.ledger = tf_dpsub.accounting.PrivacyLedger()
    return model.ledger


def _hostile(rows=40):
    """Rows of all kinds of sizes, with labels in and out of range."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((rows, 4)).astype("float32")
    scales = np.float32([1e-30, 1.0, 30.0, 1e18, 3e38, np.inf, np.nan, 0.0])
    with np.errstate(over="ignore", invalid="ignore"):
        x *= np.resize(scales, rows)[:, None]
    return x, generator.integers(-2, 5, rows)


def _evaluation(model, x, y, **kwargs):
    kwargs = {"metrics": BOTH, "noise_multiplier": 2.0, **kwargs}
    return PrivateEvaluation(model, x, y, **kwargs)


def test_a_row_moves_the_sum_by_no_more_than_the_sensitivity(model):
    x, y = _hostile()
    values = _evaluation(model, x, y).checked()
    assert np.isfinite(values).all()
    assert np.linalg.norm(values, axis=1).max() <= math.sqrt(2)
    for k in (0, 5, 6):
        rest = np.delete(x, k, 0), np.delete(y, k)
        without = _evaluation(model, *rest).checked()
        moved = values.sum(0) - without.sum(0)
        assert np.linalg.norm(moved) <= math.sqrt(2) + 1e-12


def test_the_bound_of_all_metrics_is_reached(model):
    """The noise is not larger than a row needs."""
    x = np.zeros((1, 4), "float32")
    best = int(np.argmax(model.model(x)))
    values = _evaluation(
        model, x, np.array([best]), metrics={"accuracy": 1.0, "loss": 1e-9}
    ).checked()
    np.testing.assert_array_equal(values, [[1.0, 1.0]])


def test_what_is_not_finite_counts_as_the_worst(model):
    x = np.full((2, 4), np.nan, "float32")
    values = _evaluation(model, x, np.array([7, -1])).checked()
    np.testing.assert_array_equal(values, [[0.0, 1.0]] * 2)


def test_a_person_moves_the_sum_by_no_more_than_one_row(model):
    x, y = _hostile()
    persons = np.array([f"person {k % 3}" for k in range(len(x))])
    both = _evaluation(model, x, y, person_ids=persons)
    assert both.units == 3
    rows = _evaluation(model, x, y).checked()
    means = [rows[k::3].mean(0) for k in range(3)]
    np.testing.assert_allclose(both.checked(), means, rtol=1e-12)
    kept = persons != "person 1"
    without = _evaluation(model, x[kept], y[kept], person_ids=persons[kept])
    moved = both.checked().sum(0) - without.checked().sum(0)
    assert np.linalg.norm(moved) <= math.sqrt(2) + 1e-12


def test_rows_that_a_model_mixes_are_evaluated_one_at_a_time():
    inputs = keras.Input((4,))
    shifted = inputs - keras.ops.mean(inputs, axis=0, keepdims=True)
    plain = keras.Model(inputs, keras.layers.Dense(3)(shifted))
    model = _private(plain)
    x = np.random.default_rng(0).standard_normal((5, 4)).astype("float32")
    values = _evaluation(model, x, np.arange(5) % 3, metrics={"loss": 9.0})
    # Alone, each row is its own mean, and all outputs are equal.
    np.testing.assert_allclose(values.checked(), math.log(3) / 9, rtol=1e-6)


def test_what_python_functions_keep_is_an_assumption():
    class Python(keras.layers.Layer):
        def call(self, inputs):
            outputs = tf.numpy_function(np.tanh, [inputs], tf.float32)
            outputs.set_shape(inputs.shape)
            return outputs

    inputs = keras.Input((4,))
    model = _private(
        keras.Model(inputs, keras.layers.Dense(3)(Python()(inputs)))
    )
    x, y = np.zeros((5, 4), "float32"), np.zeros(5, int)
    model.evaluate_privately(x, y, noise_multiplier=9.0)
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert "what Python functions" in statement


def test_noise_is_that_which_is_accounted_for(model):
    x = np.zeros((1, 4), "float32")
    evaluation = _evaluation(
        model, x, np.zeros(1), noise_multiplier=3.0, seed=0, metrics=BOTH
    )
    draws = []
    for _ in range(300):
        released = evaluation.released(np.zeros((1, 2)))
        draws.append([released[n].value / BOTH[n] for n in BOTH])
    # In units of the sensitivity, rounding included.
    draws = np.array(draws) / (3.0 * math.sqrt(2))
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.3
    assert 0.9 < draws.std() < 1.1


def test_released_numbers_lie_on_a_grid(model):
    """The low bits of what is released tell nothing of the sum."""
    evaluation = _evaluation(
        model,
        np.zeros((1, 4), "float32"),
        np.zeros(1),
        metrics={"accuracy": 1.0},
    )
    value = evaluation.released(np.full((1, 1), 1 / 3))["accuracy"].value
    spacing = grid.spacing(2.0, 1.0, 1)
    multiple = value * (1 - 2.0**-20 - grid.MARGIN) / spacing
    assert abs(multiple - round(multiple)) < 1e-6


def test_intervals_hold_the_mean(model):
    x, y = np.zeros((50, 4), "float32"), np.zeros(50, int)
    evaluation = _evaluation(model, x, y, seed=1, metrics={"accuracy": 1.0})
    values = np.linspace(0, 1, 50)[:, None]
    held = 0
    for _ in range(200):
        estimate = evaluation.released(values, confidence=0.8)["accuracy"]
        held += estimate.low <= 0.5 <= estimate.high
    # 160 are expected.
    assert 130 < held < 185


@pytest.mark.parametrize(
    ("last", "activation", "loss", "metric"),
    [
        (3, None, "crossentropy", "accuracy"),
        (1, "sigmoid", "binary_crossentropy", "accuracy"),
        (3, "softmax", "categorical_crossentropy", "accuracy"),
        (1, None, "mse", "mean_absolute_error"),
    ],
)
def test_agrees_with_keras(last, activation, loss, metric):
    plain = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(last, activation),
        ]
    )
    model = _private(plain, loss)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((150, 4)).astype("float32")
    y = generator.integers(2, size=150)
    if loss == "categorical_crossentropy":
        y = np.eye(3)[y]
    released = model.evaluate_privately(
        x,
        y,
        noise_multiplier=1e-4,
        metrics={metric: 50.0, "loss": 50.0},
        seed=0,
    )
    plain.compile("sgd", model.loss, metrics=[metric])
    expected = plain.evaluate(x, y, return_dict=True, verbose=0)
    for name in (metric, "loss"):
        assert released[name].value == pytest.approx(expected[name], abs=5e-4)
    assert model.ledger.entries[0].fixed_seed


def test_epsilon_is_that_of_gaussians(model, ledger, tmp_path):
    model.ledger = tf_dpsub.accounting.PrivacyLedger(tmp_path / "ledger.json")
    x, y = _hostile()
    for _ in range(3):
        model.evaluate_privately(x, y, noise_multiplier=4.0, metrics=BOTH)
    model.evaluate_privately(x, y, noise_multiplier=2.0)
    sigma = (3 / 4.0**2 + 1 / 2.0**2) ** -0.5
    assert model.epsilon(1e-5) == pytest.approx(
        dp_accounting.get_epsilon_gaussian(sigma, 1e-5), rel=1e-9
    )
    written = tf_dpsub.accounting.PrivacyLedger(tmp_path / "ledger.json")
    assert [entry.steps for entry in written.entries] == [3, 1]
    words = " ".join(model.privacy_statement(1e-5).split())
    assert "PrivateValidation: 3 releases" in words
    assert "40 rows" in words


def test_is_charged_before_it_is_released(model, ledger, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(PrivateEvaluation, "released", fail)
    with pytest.raises(KeyboardInterrupt):
        model.evaluate_privately(*_hostile(), noise_multiplier=1.0)
    assert ledger.steps == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0.0}, "0 < noise_multiplier"),
        ({"noise_multiplier": math.inf}, "0 < noise_multiplier"),
        ({"metrics": {}}, "dict of names and bounds"),
        ({"metrics": ["accuracy"]}, "dict of names and bounds"),
        ({"metrics": {"loss": math.inf}}, "without a bound"),
        ({"metrics": {"loss": -1.0}}, "bound > 0"),
        ({"metrics": {"acuracy": 1.0}}, "one of Keras's metrics"),
        ({"metrics": {"auc": 1.0}}, "mean over rows"),
        ({"person_ids": [1, 2]}, "one for each row"),
        ({"person_ids": np.full(40, np.nan)}, "whole numbers or strings"),
        ({"confidence": 1.0}, "confidence"),
        ({"seed": -1}, "seed"),
        ({"y": np.zeros(3)}, "with as many rows"),
        ({"y": None}, "Expected targets"),
        ({"y": [0, 1]}, "with as many rows"),
        ({"x": tf.data.Dataset.range(3)}, "Expected arrays"),
    ],
)
def test_bad_input_charges_nothing(model, ledger, changes, message):
    x, y = _hostile()
    arguments = {"x": x, "y": y, "noise_multiplier": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        model.evaluate_privately(**arguments)
    assert ledger.steps == 0


def test_refuses_a_loss_that_is_none():
    model = tf_dpsub.make_private(tf_dpsub.models.mlp((4,), (8,), 3))
    x, y = _hostile()
    with pytest.raises(ValueError, match="without one"):
        model.evaluate_privately(
            x, y, noise_multiplier=1.0, metrics={"loss": 1.0}
        )
    assert model.ledger.steps == 0
    # Others need no compiling.
    assert model.evaluate_privately(x, y, noise_multiplier=1.0)


def test_refuses_one_of_several_workers(model, ledger, monkeypatch):
    monkeypatch.setattr(workers, "is_one_of_several", lambda _: True)
    with pytest.raises(ValueError, match="one process"):
        model.evaluate_privately(*_hostile(), noise_multiplier=1.0)
    assert ledger.steps == 0
