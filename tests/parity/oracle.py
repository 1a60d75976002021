"""Results of TensorFlow Privacy 0.9.0, for `compare`.

`python -m tests.parity.oracle task.npz` runs in TensorFlow Privacy's own
environment and prints one JSON object as its last line. `compare` imports this
module for the settings, so nothing at its top needs TensorFlow.
"""

import json
import math
import sys

import numpy as np

# n, batch size, noise multiplier, epochs, delta.
SETTINGS = [
    (n, batch_size, noise_multiplier, epochs, delta)
    for n, batch_size, epochs, delta in (
        (60000, 150, 15, 1e-5),
        (60000, 256, 60, 1e-5),
        (50000, 1000, 10, 1e-5),
        (10000, 250, 30, 1e-5),
        (73257, 1000, 50, 1e-6),
        (67349, 500, 3, 1e-6),
        (1797, 64, 20, 1e-4),
        (1000, 500, 4, 1e-4),
        (120269, 1024, 40, 1e-6),
        (1281167, 4096, 90, 1e-7),
    )
    for noise_multiplier in (0.6, 1.0, 1.3, 4.0, 18.0)
]

LEARNING_RATE = 1.0

# The first clip clips no gradient of the task, the second one nearly all.
CLIPS = {"no gradient clipped": 1e6, "gradients clipped": 0.5}


def build_model(keras):
    """The model of the comparison, in Keras 2 as in Keras 3."""
    return keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, strides=2, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(5),
        ]
    )


def epsilons():
    """Epsilon of every setting, by `RdpAccountant` of TensorFlow Privacy.

    Returns:
        dict of lists: under `"poisson"` what `compute_dp_sgd_privacy` returns,
        under `"best_orders"` the Rényi orders that gave it, out of `"orders"`;
        under `"once_per_epoch"` the other figure of
        `compute_dp_sgd_privacy_statement`, over dp-accounting's orders.
    """
    import dp_accounting
    from tensorflow_privacy.privacy.analysis import (
        compute_dp_sgd_privacy_lib as lib,
    )

    accountant = dp_accounting.rdp.RdpAccountant
    tried = set()

    def recording(orders):
        tried.add(tuple(orders))
        return accountant(orders)

    dp_accounting.rdp.RdpAccountant = recording
    poisson = [lib.compute_dp_sgd_privacy(*setting) for setting in SETTINGS]
    dp_accounting.rdp.RdpAccountant = accountant
    (orders,) = tried
    return {
        "poisson": [float(epsilon) for epsilon, _ in poisson],
        "best_orders": [float(order) for _, order in poisson],
        "orders": [float(order) for order in orders],
        "once_per_epoch": [
            float(
                lib._compute_dp_sgd_example_privacy(
                    epochs, noise_multiplier, delta, used_microbatching=False
                )
            )
            for _, _, noise_multiplier, epochs, delta in SETTINGS
        ],
    }


def steps(task):
    """Weights after one step of DP-SGD without noise.

    Args:
        task: dict of arrays: `"x"`, `"y"` and the weights, `"w0"`, `"w1"`, ...

    Returns:
        dict from the names in `CLIPS` to lists of nested lists.
    """
    import tensorflow as tf
    from tensorflow_privacy import DPKerasSGDOptimizer

    batch_size = len(task["x"])
    result = {}
    for name, clip in CLIPS.items():
        model = build_model(tf.keras)
        model.build(task["x"].shape)
        model.set_weights([task[f"w{i}"] for i in range(len(model.weights))])
        model.compile(
            DPKerasSGDOptimizer(
                l2_norm_clip=clip,
                noise_multiplier=0.0,
                num_microbatches=batch_size,
                learning_rate=LEARNING_RATE,
            ),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=tf.losses.Reduction.NONE
            ),
        )
        model.train_on_batch(task["x"], task["y"])
        result[name] = [weight.tolist() for weight in model.get_weights()]
    return result


def step_count(n, batch_size, epochs):
    """Number of steps of some epochs in TensorFlow Privacy."""
    return math.ceil(epochs * n / batch_size)


def main(path):
    from absl import logging

    # compute_dp_sgd_privacy says at each call that it is deprecated.
    logging.set_verbosity(logging.ERROR)
    with np.load(path) as task:
        print(json.dumps({**epsilons(), "steps": steps(dict(task))}))


if __name__ == "__main__":
    main(sys.argv[1])
