import keras
import numpy as np
import pytest

from tf_dpsub import models

SMALL_WIDE = {"depth": 10, "width": 2}


@pytest.mark.parametrize(
    "name, shape, kwargs",
    [
        ("mnist_cnn", (28, 28, 1), {"activation": "tanh"}),
        ("gep_mnist_cnn", (28, 28, 1), {"activation": "tanh"}),
        ("mlp", (8, 8, 1), {"hidden": (5,)}),
        ("resnet20_gn", (8, 8, 1), {"groups": 8}),
        ("wide_resnet_gn", (8, 8, 1), SMALL_WIDE),
    ],
)
class TestEveryModel:
    def test_is_built_with_the_asked_shapes(self, name, shape, kwargs):
        model = models.get(name, list(shape), 7, **kwargs)
        assert model.built
        assert model.name.startswith(name)
        assert model.input_shape == (None, *shape)
        assert model.output_shape == (None, 7)

    def test_every_weight_is_trainable(self, name, shape, kwargs):
        model = models.get(name, shape, 7, **kwargs)
        assert len(model.trainable_weights) == len(model.weights) > 0

    def test_gives_finite_logits_that_follow_the_input(
        self, name, shape, kwargs
    ):
        model = models.get(name, shape, 7, **kwargs)
        x = np.random.default_rng(0).random((3, *shape), np.float32)
        logits = keras.ops.convert_to_numpy(model(x))
        assert np.isfinite(logits).all()
        assert (np.std(logits, axis=0) > 0).all()
        # Probabilities of one example would sum to 1.
        assert (np.abs(logits.sum(axis=1) - 1) > 1e-3).all()

    def test_is_rebuilt_from_its_config(self, name, shape, kwargs):
        model = models.get(name, shape, 7, **kwargs)
        copy = keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(model)
        )
        copy.set_weights(model.get_weights())
        x = np.random.default_rng(0).random((2, *shape), np.float32)
        np.testing.assert_array_equal(copy(x), model(x))


def test_keyword_arguments_reach_the_model():
    model = models.get("mlp", (4,), 2, hidden=(3,))
    assert model.count_params() == 4 * 3 + 3 + 3 * 2 + 2


def test_every_name_is_the_function_of_that_name():
    assert {n: f.__name__ for n, f in models.NAMES.items()} == {
        n: n for n in models.NAMES
    }
    assert all(getattr(models, n) is f for n, f in models.NAMES.items())


def test_unknown_name_lists_the_models():
    with pytest.raises(ValueError, match="resnet20_gn.*'mnist_cn'.*mnist_cnn"):
        models.get("mnist_cn", (28, 28, 1), 10)


def test_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="hiden"):
        models.get("mlp", (4,), 2, hiden=(3,))
