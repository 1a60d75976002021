"""Fully connected networks."""

import keras


def mlp(
    input_shape: tuple,
    hidden=(128, 128),
    num_classes: int = 10,
    activation="relu",
):
    """Builds a fully connected network over the flattened input.

    With its default hidden layers and 28×28 inputs (118,282 parameters) it is
    the network whose gradient spectrum Figure 1 of the PDP-SGD paper shows.
    It is also the model for small data sets such as the 8×8 digits.

    Args:
        input_shape: tuple of ints, the shape of one example.
        hidden: sequence of ints, the width of each hidden layer. Empty for a
            linear model. Defaults to `(128, 128)`.
        num_classes: int, number of logits. Defaults to `10`.
        activation: str or callable, activation of the hidden layers. Defaults
            to `"relu"`.

    Returns:
        A built `keras.Model`, from `[batch, *input_shape]` to logits
        `[batch, num_classes]`.

    Reference:
        [Zhou, Wu, Banerjee: Bypassing the Ambient Dimension: Private SGD with
        Gradient Subspace Identification, ICLR 2021](
        https://arxiv.org/abs/2007.03813)
    """
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    for units in hidden:
        x = keras.layers.Dense(units, activation=activation)(x)
    logits = keras.layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")
