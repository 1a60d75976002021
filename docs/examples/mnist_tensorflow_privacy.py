"""MNIST by TensorFlow Privacy 0.9, in Keras 2 on TensorFlow 2.15.

The network, the data and the settings are those of TensorFlow Privacy's own
`tutorials/mnist_dpsgd_tutorial_keras.py`. `mnist_tf_dpsub.py` is the same
program, ported to this package.
"""

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import app, flags
from tensorflow_privacy import VectorizedDPKerasSGDOptimizer
from tensorflow_privacy import compute_dp_sgd_privacy_statement as statement

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
    optimizer = VectorizedDPKerasSGDOptimizer(
        l2_norm_clip=_CLIP.value,
        noise_multiplier=_NOISE.value,
        num_microbatches=_BATCH.value,
        learning_rate=_LEARNING_RATE.value,
    )
    loss = tf.keras.losses.CategoricalCrossentropy(
        from_logits=True, reduction=tf.losses.Reduction.NONE
    )
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        x_train,
        y_train,
        epochs=_EPOCHS.value,
        validation_data=images("test"),
        batch_size=_BATCH.value,
        verbose=2,
    )
    run = (len(x_train), _BATCH.value, _EPOCHS.value, _NOISE.value)
    print(statement(*run, delta=1e-5, used_microbatching=False))


if __name__ == "__main__":
    app.run(main)
