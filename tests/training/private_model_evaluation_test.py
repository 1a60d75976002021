"""What a private model tells, and what becomes of the plain one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import (
    CLASSES,
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
    mlp,
    private,
    twin,
)

layers = keras.layers


class TestEvaluateAndPredict:
    def test_equal_those_of_the_plain_model(self):
        plain = mlp(layers.Dense(5, "relu"), layers.Dropout(0.5))
        expected = twin(plain)
        metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
        expected.compile(loss=loss(), **metrics)
        model = private(plain, dpsgd(), **metrics)
        np.testing.assert_array_equal(
            model.predict(X, batch_size=8, verbose=0),
            expected.predict(X, batch_size=8, verbose=0),
        )
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
        for arguments in (
            {"x": X, "y": Y, "batch_size": 8},
            {"x": X, "y": Y, "sample_weight": W},
            {"x": dataset},
        ):
            assert model.evaluate(
                **arguments, verbose=0, return_dict=True
            ) == pytest.approx(
                expected.evaluate(**arguments, verbose=0, return_dict=True),
                rel=1e-6,
            )
        assert model.evaluate(X, Y, verbose=0) == pytest.approx(
            expected.evaluate(X, Y, verbose=0), rel=1e-6
        )
        assert model(X).shape == (EXAMPLES, CLASSES)

    def test_release_nothing(self):
        model = private(linear(), dpsgd())
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
        assert model.ledger.steps == 0

    def test_looks_like_the_plain_model(self, capsys):
        inputs = keras.Input((FEATURES,))
        head = layers.Dense(CLASSES, name="head")
        plain = keras.Model(inputs, head(inputs))
        model = tf_dpsub.make_private(plain)
        assert model.input_shape == (None, FEATURES)
        assert model.output_shape == (None, CLASSES)
        assert model.compute_output_shape((7, FEATURES)) == (7, CLASSES)
        assert model.output_names == ["head"]
        assert model.count_params() == plain.count_params()
        model.summary()
        assert "head" in capsys.readouterr().out


class TestPlainModel:
    def test_is_the_same_object_as_before(self):
        plain = linear()
        before = (type(plain), plain.get_config(), set(vars(plain)))
        variables = plain.variables
        model = private(plain, dpsgd())
        model.fit(X, Y, verbose=0)
        assert (type(plain), plain.get_config(), set(vars(plain))) == before
        assert plain.variables == variables
        assert model.model is plain
        assert not plain.compiled

    def test_trains_plainly_afterwards(self):
        plain = linear()
        private(plain, dpsgd()).fit(X, Y, verbose=0)
        expected = twin(plain)
        fit_plainly(plain, keras.optimizers.SGD(0.1))
        fit_plainly(expected, keras.optimizers.SGD(0.1))
        assert_same_weights(plain, expected)

    def test_may_be_trained_privately_by_two(self):
        """Each counts what it did, and neither what the other did."""
        plain = linear()
        first, second = private(plain, dpsgd()), private(plain, dpsgd())
        first.fit(X, Y, verbose=0)
        second.fit(X, Y, epochs=2, verbose=0)
        assert first.ledger.steps == 5
        assert second.ledger.steps == 10
