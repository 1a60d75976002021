"""Residual networks for small images, with GroupNorm instead of BatchNorm.

BatchNorm makes the output for one example depend on the others, so that no
per-example gradient exists; GroupNorm normalises each example alone.
"""

import keras

_STAGES = 3


def resnet20_gn(
    input_shape: tuple = (32, 32, 3), num_classes: int = 10, groups: int = 4
):
    """Builds the CIFAR ResNet-20, with GroupNorm.

    Three stages of three blocks with 16, 32 and 64 filters; the first block
    of the second and third stage halves the image. Where the shape changes,
    the shortcut is a 1×1 convolution and a GroupNorm (option B of the ResNet
    paper). 272,474 parameters for 32×32×3 inputs and 10 classes.

    Layers with weights are called `input_...`, `stage1_block1_...` to
    `stage3_block3_...`, and `logits`.

    Args:
        input_shape: tuple of ints, height, width and channels of one image.
            Defaults to `(32, 32, 3)`.
        num_classes: int, number of logits. Defaults to `10`.
        groups: int, groups of every GroupNorm, a divisor of 16. Defaults to
            `4`, as in the GEP authors' code.

    Returns:
        A built `keras.Model`, from `[batch, height, width, channels]` to
        logits `[batch, num_classes]`.

    Reference:
        - [He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition,
          CVPR 2016, Section 4.2](https://arxiv.org/abs/1512.03385)
        - [Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient
          Embedding Perturbation for Private Learning, ICLR 2021](
          https://arxiv.org/abs/2102.12677)
    """
    inputs = keras.Input(input_shape)
    x = _norm_relu(_conv(inputs, 16, "input_conv"), groups, "input_norm")
    x = _stages(x, _block, width=1, blocks=3, groups=groups)
    return _classifier(inputs, x, num_classes, "resnet20_gn")


def wide_resnet_gn(
    input_shape: tuple = (32, 32, 3),
    num_classes: int = 10,
    depth: int = 28,
    width: int = 4,
    groups: int = 16,
):
    """Builds a wide residual network (WRN), with GroupNorm.

    Three stages of `(depth - 4) / 6` pre-activated blocks with 16, 32 and 64
    times `width` filters. Where the shape changes, the shortcut is a 1×1
    convolution of the activated input. WRN-28-4 has 5,849,050 parameters for
    32×32×3 inputs and 10 classes.

    Args:
        input_shape: tuple of ints, height, width and channels of one image.
            Defaults to `(32, 32, 3)`.
        num_classes: int, number of logits. Defaults to `10`.
        depth: int, number of convolutional layers, 6n + 4. Defaults to `28`.
        width: int, factor on the number of filters. Defaults to `4`.
        groups: int, groups of every GroupNorm, a divisor of 16. Defaults to
            `16`.

    Returns:
        A built `keras.Model`, from `[batch, height, width, channels]` to
        logits `[batch, num_classes]`.

    Raises:
        ValueError: if `depth` is not 6n + 4 for some n ≥ 1.

    Reference:
        - [Zagoruyko, Komodakis: Wide Residual Networks, BMVC 2016](
          https://arxiv.org/abs/1605.07146)
        - [Yu, Zhang, Chen, Yin, Liu: Large Scale Private Learning via
          Low-rank Reparametrization, ICML 2021](
          https://arxiv.org/abs/2106.09352)
    """
    blocks, remainder = divmod(depth - 4, 2 * _STAGES)
    if blocks < 1 or remainder:
        raise ValueError(
            "Expected depth = 6n + 4 with n >= 1 (10, 16, 22, 28, ...), "
            f"because a WRN has three stages of n blocks, got {depth}."
        )
    inputs = keras.Input(input_shape)
    x = _conv(inputs, 16, "input_conv")
    x = _stages(x, _preactivated_block, width, blocks, groups)
    x = _norm_relu(x, groups, "output_norm")
    return _classifier(
        inputs, x, num_classes, f"wide_resnet_gn_{depth}_{width}"
    )


def wrn28_4_gn(input_shape=(32, 32, 3), num_classes=10):
    """Builds the network of the RGP paper: 5,849,050 parameters.

    Args: as `wide_resnet_gn`.
    """
    return wide_resnet_gn(input_shape, num_classes, depth=28, width=4)


def wrn28_2_gn(input_shape=(32, 32, 3), num_classes=10):
    """Builds the network that the RGP paper counts: 1,467,610 parameters.

    Args: as `wide_resnet_gn`.
    """
    return wide_resnet_gn(input_shape, num_classes, depth=28, width=2)


def _stages(x, block, width, blocks, groups):
    for stage in range(_STAGES):
        for i in range(blocks):
            strides = 2 if stage > 0 and i == 0 else 1
            name = f"stage{stage + 1}_block{i + 1}"
            x = block(x, 16 * width * 2**stage, strides, groups, name)
    return x


def _block(x, filters, strides, groups, name):
    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        shortcut = _conv(
            x, filters, f"{name}_shortcut_conv", size=1, strides=strides
        )
        shortcut = _norm(shortcut, groups, f"{name}_shortcut_norm")
    x = _conv(x, filters, f"{name}_conv1", strides=strides)
    x = _norm_relu(x, groups, f"{name}_norm1")
    x = _norm(_conv(x, filters, f"{name}_conv2"), groups, f"{name}_norm2")
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))


def _preactivated_block(x, filters, strides, groups, name):
    shortcut = x
    x = _norm_relu(x, groups, f"{name}_norm1")
    if strides != 1 or x.shape[-1] != filters:
        shortcut = _conv(
            x, filters, f"{name}_shortcut_conv", size=1, strides=strides
        )
    x = _conv(x, filters, f"{name}_conv1", strides=strides)
    x = _norm_relu(x, groups, f"{name}_norm2")
    return keras.layers.Add()([_conv(x, filters, f"{name}_conv2"), shortcut])


def _conv(x, filters, name, size=3, strides=1):
    return keras.layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )(x)


def _norm(x, groups, name):
    return keras.layers.GroupNormalization(groups, name=name)(x)


def _norm_relu(x, groups, name):
    return keras.layers.ReLU()(_norm(x, groups, name))


def _classifier(inputs, x, num_classes, name):
    x = keras.layers.GlobalAveragePooling2D()(x)
    logits = keras.layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, logits, name=name)
