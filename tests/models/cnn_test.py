import keras
import numpy as np
import pytest

from tf_dpsub.models import gep_mnist_cnn, mnist_cnn


def test_is_the_papers_network():
    model = mnist_cnn()
    assert model.count_params() == 26_010
    shapes = [layer.output.shape[1:] for layer in model.layers]
    assert shapes == [
        (28, 28, 1),
        (14, 14, 16),
        (13, 13, 16),
        (5, 5, 32),
        (4, 4, 32),
        (512,),
        (32,),
        (10,),
    ]


def test_activation_is_used_in_hidden_layers_only():
    model = mnist_cnn(activation="tanh")
    activations = [
        layer.activation
        for layer in model.layers
        if hasattr(layer, "activation")
    ]
    tanh, linear = keras.activations.tanh, keras.activations.linear
    assert activations == [tanh, tanh, tanh, linear]


def test_smallest_and_colour_images():
    model = mnist_cnn(input_shape=(13, 17, 3), num_classes=2)
    assert model(np.ones((2, 13, 17, 3), np.float32)).shape == (2, 2)


@pytest.mark.parametrize("shape", [(8, 8, 1), (12, 28, 1), (28, 28)])
def test_refuses_images_that_are_too_small(shape):
    with pytest.raises(ValueError, match="at least 13 pixels.*mlp"):
        mnist_cnn(input_shape=shape)


class TestGepMnistCnn:
    def test_is_two_convolutions_with_max_pooling_and_one_dense_layer(self):
        model = gep_mnist_cnn()
        kinds = [type(layer).__name__ for layer in model.layers[1:]]
        assert kinds == [*["Conv2D", "MaxPooling2D"] * 2, "Flatten", "Dense"]
        assert model.count_params() == 20_490

    def test_activation_is_used_in_convolutions_only(self):
        activations = [
            layer.activation
            for layer in gep_mnist_cnn(activation="tanh").layers
            if hasattr(layer, "activation")
        ]
        tanh, linear = keras.activations.tanh, keras.activations.linear
        assert activations == [tanh, tanh, linear]

    @pytest.mark.parametrize("shape", [(3, 28, 1), (784,)])
    def test_refuses_inputs_that_are_too_small(self, shape):
        with pytest.raises(ValueError, match="at least 4 pixels.*mlp"):
            gep_mnist_cnn(input_shape=shape)
