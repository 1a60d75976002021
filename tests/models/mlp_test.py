import keras
import pytest

from tf_dpsub.models import mlp


@pytest.mark.parametrize(
    "shape, hidden, parameters",
    [
        ((28, 28, 1), (128, 128), 118_282),
        ((8, 8, 1), (16,), 64 * 16 + 16 + 16 * 10 + 10),
        ((64,), (7,), 64 * 7 + 7 + 7 * 10 + 10),
        ((3, 5), (), 15 * 10 + 10),
    ],
)
def test_parameters(shape, hidden, parameters):
    assert mlp(shape, hidden).count_params() == parameters


def test_activation_is_used_in_hidden_layers_only():
    model = mlp((4,), hidden=(3, 2), activation="tanh")
    activations = [layer.activation for layer in model.layers[2:]]
    tanh, linear = keras.activations.tanh, keras.activations.linear
    assert activations == [tanh, tanh, linear]
