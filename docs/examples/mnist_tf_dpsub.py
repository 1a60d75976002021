"""MNIST by tf_dpsub: `mnist_tensorflow_privacy.py`, ported."""

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import app, flags

import tf_dpsub

_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.15, "Learning rate of SGD."
)
_NOISE = flags.DEFINE_float("noise_multiplier", 1.1, "Noise multiplier.")
_CLIP = flags.DEFINE_float("l2_norm_clip", 1.0, "Clipping norm.")
_BATCH = flags.DEFINE_integer("batch_size", 250, "Batch size.")
_EXAMPLES = flags.DEFINE_integer("examples", 60_000, "Training examples.")
_EPOCHS = flags.DEFINE_integer("epochs", 15, "Number of epochs.")


def images(split):
    """Images in [0, 1], and one-hot labels."""
    x, y = tfds.as_numpy(
        tfds.load("mnist", split=split, batch_size=-1, as_supervised=True)
    )
    return x.astype("float32") / 255, np.eye(10, dtype="float32")[y]


def main(_):
    x_train, y_train = images(f"train[:{_EXAMPLES.value}]")
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.InputLayer((28, 28, 1)),
            layers.Conv2D(16, 8, 2, padding="same", activation="relu"),
            layers.MaxPool2D(2, 1),
            layers.Conv2D(32, 4, 2, activation="relu"),
            layers.MaxPool2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )
    model = tf_dpsub.make_private(model)
    optimizer = tf_dpsub.optimizers.DPSGD(
        tf.keras.optimizers.SGD(_LEARNING_RATE.value),
        l2_norm_clip=_CLIP.value,
        noise_multiplier=_NOISE.value,
        batch_size=_BATCH.value,
    )
    loss = tf.keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        x_train,
        y_train,
        epochs=_EPOCHS.value,
        validation_data=images("test"),
        batch_size=_BATCH.value,
        verbose=2,
    )
    print(model.privacy_statement(1e-5))


if __name__ == "__main__":
    app.run(main)
