"""Small convolutional networks."""

import keras

_SMALLEST_SIDE = 13


def mnist_cnn(
    input_shape: tuple = (28, 28, 1), num_classes: int = 10, activation="relu"
):
    """Builds the PDP-SGD paper's network for MNIST and Fashion-MNIST.

    Two convolutions (16 filters 8×8, stride 2, same; 32 filters 4×4, stride 2,
    valid), each followed by a 2×2 max-pool of stride 1, then a hidden layer of
    32 units: 26,010 parameters for 28×28×1 inputs and 10 classes.

    Args:
        input_shape: tuple of ints, height, width and channels of one image,
            each side at least 13 pixels. Defaults to `(28, 28, 1)`.
        num_classes: int, number of logits. Defaults to `10`.
        activation: str or callable, activation of the hidden layers. Defaults
            to `"relu"`.

    Returns:
        A built `keras.Model`, from `[batch, height, width, channels]` to
        logits `[batch, num_classes]`.

    Raises:
        ValueError: if the images are too small for the network.

    Reference:
        [Zhou, Wu, Banerjee: Bypassing the Ambient Dimension: Private SGD with
        Gradient Subspace Identification, ICLR 2021](
        https://arxiv.org/abs/2007.03813)
    """
    if len(input_shape) != 3 or min(input_shape[:2]) < _SMALLEST_SIDE:
        raise ValueError(
            "Expected input_shape = (height, width, channels) with sides of "
            f"at least {_SMALLEST_SIDE} pixels, which the two strided "
            f"convolutions of mnist_cnn use up, got {tuple(input_shape)}. Use "
            "tf_dpsub.models.mlp for smaller inputs."
        )
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(16, 8, strides=2, padding="same", activation=activation)(
        inputs
    )
    x = layers.MaxPooling2D(2, strides=1)(x)
    x = layers.Conv2D(32, 4, strides=2, padding="valid", activation=activation)(
        x
    )
    x = layers.MaxPooling2D(2, strides=1)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(32, activation=activation)(x)
    logits = layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, logits, name="mnist_cnn")


def gep_mnist_cnn(
    input_shape: tuple = (28, 28, 1), num_classes: int = 10, activation="relu"
):
    """Builds a network for MNIST of the kind that the GEP paper trains.

    The paper has two convolutions with max-pooling and one dense layer, and
    gives no sizes. Here the convolutions have 16 and 32 filters 3×3, and each
    max-pool is 2×2: 20,490 parameters for 28×28×1 inputs and 10 classes.

    Args:
        input_shape: tuple of ints, height, width and channels of one image,
            each side at least 4 pixels. Defaults to `(28, 28, 1)`.
        num_classes: int, number of logits. Defaults to `10`.
        activation: str or callable, activation of the convolutions. Defaults to
            `"relu"`.

    Returns:
        A built `keras.Model`, from `[batch, height, width, channels]` to
        logits `[batch, num_classes]`.

    Raises:
        ValueError: if the images are too small for the network.

    Reference:
        [Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient
        Embedding Perturbation for Private Learning, ICLR 2021](
        https://arxiv.org/abs/2102.12677)
    """
    if len(input_shape) != 3 or min(input_shape[:2]) < 4:
        raise ValueError(
            "Expected input_shape = (height, width, channels) with sides of "
            "at least 4 pixels, which the two max-pools of gep_mnist_cnn use "
            f"up, got {tuple(input_shape)}. Use tf_dpsub.models.mlp for other "
            "inputs."
        )
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = inputs
    for filters in (16, 32):
        x = layers.Conv2D(filters, 3, padding="same", activation=activation)(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    logits = layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, logits, name="gep_mnist_cnn")
