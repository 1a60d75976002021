"""A student that learns from few labels and from many unlabelled images.

Where it is sure of an unlabelled image that is hardly changed, it learns the
same label for the image changed strongly.

Reference:
    - [Sohn et al., 2020](https://arxiv.org/abs/2001.07685), FixMatch
"""

import keras
import tensorflow as tf

_LABELLED, _UNLABELLED = 32, 160
_CONFIDENCE = 0.95
_LEARNING_RATE = 2e-3
_MOMENTUM = 0.99
# Shift as a share of the side, radians of rotation and of shear, logarithm of
# scale.
_WEAK = (0.07, 0.1, 0.05)
_OF_LABELLED = (0.07, 0.2, 0.1)
_STRONG = (0.11, 0.35, 0.2)
_CUT = 0.36


def train(x_labelled, labels, x_unlabelled, classes, *, steps, seed):
    """Trains a convolutional network, whose weights are averaged.

    Formal guarantees: nothing private is read. The network is a function of
    labels that were released and of public images.

    Args:
        x_labelled: float array `[examples, height, width, channels]`.
        labels: int array `[examples]`.
        x_unlabelled: float array `[images, height, width, channels]`.
        classes: int.
        steps: int.
        seed: int, of weights, batches and changes of images.

    Returns:
        Keras model, of images, that gives logits.
    """
    keras.utils.set_random_seed(seed)
    model = _network(x_labelled.shape[1:], classes)
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(_LEARNING_RATE, steps),
        use_ema=True,
        ema_momentum=_MOMENTUM,
    )
    images, others = tf.constant(x_labelled), tf.constant(x_unlabelled)
    labels = tf.constant(labels, tf.int32)

    @tf.function
    def step():
        few = tf.random.uniform([_LABELLED], 0, len(images), tf.int32)
        many = tf.random.uniform([_UNLABELLED], 0, len(others), tf.int32)
        unlabelled = tf.gather(others, many)
        guess = tf.nn.softmax(
            model(_changed(unlabelled, *_WEAK), training=False)
        )
        is_sure = tf.reduce_max(guess, 1) > _CONFIDENCE
        batch = tf.concat(
            [
                _changed(tf.gather(images, few), *_OF_LABELLED),
                _cut(_changed(unlabelled, *_STRONG)),
            ],
            0,
        )
        with tf.GradientTape() as tape:
            logits = model(batch, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.concat(
                    [
                        tf.gather(labels, few),
                        tf.argmax(guess, 1, tf.int32),
                    ],
                    0,
                ),
                logits,
            )
            counted = tf.where(is_sure, losses[_LABELLED:], 0.0)
            loss = tf.reduce_mean(losses[:_LABELLED]) + tf.reduce_mean(counted)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    for _ in range(steps):
        step()
    optimizer.finalize_variable_values(model.trainable_variables)
    return model


def _network(shape, classes):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(32, 5, strides=2, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(128, activation="relu"),
            layers.Dense(classes),
        ]
    )


def _changed(images, shift, angle, log_scale):
    """Images that are shifted, rotated, sheared and scaled at random."""
    count, (height, width) = len(images), images.shape[1:3]

    def drawn(limit):
        return tf.random.uniform([count], -limit, limit)

    turned, scale = drawn(angle), tf.exp(drawn(log_scale))
    a, b = tf.cos(turned) / scale, drawn(angle) - tf.sin(turned) / scale
    c, d = tf.sin(turned) / scale, tf.cos(turned) / scale
    x, y = (width - 1) / 2, (height - 1) / 2  # The middle stays.
    transforms = [
        a,
        b,
        x - a * x - b * y + drawn(shift * width),
        c,
        d,
        y - c * x - d * y + drawn(shift * height),
        tf.zeros([count]),
        tf.zeros([count]),
    ]
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack(transforms, 1),
        output_shape=[height, width],
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
        fill_value=0.0,
    )


def _cut(images):
    """Images with a black square each, at a random place."""
    inside = []
    for size in images.shape[1:3]:
        centre = tf.random.uniform([len(images), 1], 0, size)
        places = tf.range(size, dtype=tf.float32)[None]
        inside.append(tf.abs(places - centre) < _CUT * size / 2)
    rows, columns = inside
    square = rows[:, :, None] & columns[:, None]
    return tf.where(square[..., None], 0.0, images)
