"""Trains by mechanisms on one device, on two, or as one of several workers.

`main` needs a process of its own: devices and workers are set up before
TensorFlow starts. It prints its results as one line of JSON.
"""

import json

import keras
import numpy as np
import tensorflow as tf

import tf_dpsub
from tf_dpsub import optimizers, subspaces

EXAMPLES, STEPS = 41, 4
CLIP, RATE = 0.3, 0.5
# Small, so that it does not hide the sums.
NOISE = 0.1
_GENERATOR = np.random.default_rng(0)
X = _GENERATOR.normal(size=(EXAMPLES, 40)).astype("float32")
Y = _GENERATOR.integers(0, 6, EXAMPLES)
_PUBLIC = _GENERATOR.normal(size=(20, 40)).astype("float32")


def _two_devices():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


_STRATEGIES = {
    "one": tf.distribute.get_strategy,
    "mirrored": _two_devices,
    "workers": tf.distribute.MultiWorkerMirroredStrategy,
}


def _public(**settings):
    return subspaces.PublicSubspace(_PUBLIC, seed=1, **settings)


def _random():
    return subspaces.RandomSubspace(100, update_every=2, seed=1)


def _in_layers():
    return _public(rank=6, groups="layers", update_every=2)


def _chosen():
    return _public(rank="auto", max_rank=6, horizon=10**6)


# Optimizers, and functions that make their arguments: one for each kind of sums
# and of public state. B-GEP is a part of GEP, on what RPDP-SGD has.
MECHANISMS = {
    "DP-SGD": ("DPSGD", dict),
    "DP-SGD, bands": ("DPSGD", lambda: {"bands": 2}),
    "DP-SGD, adaptive": (
        "AdaptiveDPSGD",
        lambda: {"clipped_count_stddev": 10.0},
    ),
    "PDP-SGD": (
        "ProjectedDPSGD",
        lambda: {"subspace": _in_layers(), "start_step": 1},
    ),
    "PDP-SGD, k chosen": ("ProjectedDPSGD", lambda: {"subspace": _chosen()}),
    "RPDP-SGD": ("ProjectedDPSGD", lambda: {"subspace": _random()}),
    "GEP": (
        "GEP",
        lambda: {"subspace": _in_layers(), "residual_norm_clip": 0.5},
    ),
    "RGP": ("RGP", lambda: {"warmup_steps": 2}),
    "RGP-random": ("RGP", lambda: {"carriers": "random"}),
    "RGP-public": (
        "RGP",
        lambda: {
            "carriers": "public",
            "x_public": _PUBLIC,
            "update_every": 2,
        },
    ),
    "DP-PowerSGD": ("DPPowerSGD", lambda: {"rank": 3}),
}


def trained(
    strategy,
    name,
    noise=NOISE,
    seed=1,
    steps=STEPS,
    together=1,
    evaluates=False,
    has_own=False,
):
    """Results of a run in which every example is in every batch.

    Args:
        strategy: `tf.distribute.Strategy`.
        name: string, one of `MECHANISMS`.
        noise: float, noise multiplier.
        seed: int, of the noise; None for keys of the operating system.
        steps: int, of one epoch, or of two if it evaluates.
        together: int, steps per execution.
        evaluates: bool, whether it evaluates and predicts, too.
        has_own: bool, whether each host has examples of its own, of unequal
            number.

    Returns:
        dict that JSON can hold.
    """
    optimizer, arguments = MECHANISMS[name]
    arguments = arguments()
    # A batch is all of a group.
    bands = arguments.get("bands", 1)
    batch_size = EXAMPLES // bands
    x, y = X[: bands * batch_size], Y[: bands * batch_size]
    keras.utils.set_random_seed(1)
    with strategy.scope():
        plain = keras.Sequential(
            [
                keras.Input((40,)),
                keras.layers.Dense(9, activation="tanh"),
                keras.layers.Dense(6),
            ]
        )
        if optimizer == "RGP":
            tf_dpsub.layers.reparametrize(plain, 3)
        model = tf_dpsub.make_private(plain)
        model.compile(
            getattr(optimizers, optimizer)(
                keras.optimizers.SGD(RATE, momentum=0.9),
                noise_multiplier=noise,
                l2_norm_clip=CLIP,
                batch_size=batch_size,
                seed=seed,
                **arguments,
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=together,
        )
    before = _flat(plain)
    validation = {"validation_data": (X, Y)} if evaluates else {}
    data = (x, y)
    if has_own:
        data = (_own_batches(strategy, batch_size),)
    # An iterator over the replicas takes longer to begin than a step.
    epochs = 2 if evaluates else 1
    history = model.fit(
        *data,
        epochs=epochs,
        steps_per_epoch=steps // epochs,
        verbose=0,
        **validation,
    ).history
    results = {
        "change": (_flat(plain) - before).tolist(),
        "steps": model.ledger.steps,
    }
    if evaluates:
        results |= {
            "val_loss": history["val_loss"],
            "evaluated": model.evaluate(X, Y, verbose=0),
            "predicted": model.predict(X, verbose=0).tolist(),
        }
    return results


_ROWS_OF_PERSON = 3
_PERSONS = {
    "person_ids": np.arange(EXAMPLES) // _ROWS_OF_PERSON,
    "rows_per_person_per_step": _ROWS_OF_PERSON,
}
# Arguments of `fit`, the expected batch size, the steps of an epoch, and what
# an epoch changes the weights by: each row counts once in all batches together.
DRAWN = {
    "once per epoch": (
        {"sampling": "once_per_epoch"},
        9,
        5,
        -X.sum(0) / 9,
    ),
    "persons": (_PERSONS, 14, 1, -X.sum(0) / _ROWS_OF_PERSON / 14),
    "persons once per epoch": (
        _PERSONS | {"sampling": "once_per_epoch"},
        4,
        4,
        -X.sum(0) / _ROWS_OF_PERSON / 4,
    ),
}


def drawn(strategy, name):
    """Results of two epochs, without noise, of gradients that are the inputs.

    Args:
        strategy: `tf.distribute.Strategy`.
        name: string, one of `DRAWN`.

    Returns:
        dict that JSON can hold.
    """
    arguments, batch_size, _, _ = DRAWN[name]
    with strategy.scope():
        plain = keras.Sequential(
            [keras.Input((40,)), keras.layers.Dense(1, use_bias=False)]
        )
        model = tf_dpsub.make_private(plain)
        model.compile(
            optimizers.DPSGD(
                keras.optimizers.SGD(1.0),
                noise_multiplier=0.0,
                l2_norm_clip=20.0,
                batch_size=batch_size,
            ),
            lambda _, outputs: outputs[:, 0],
        )
    before = _flat(plain)
    model.fit(X, Y, epochs=2, verbose=0, **arguments)
    return {
        "change": (_flat(plain) - before).tolist(),
        "steps": model.ledger.steps,
    }


class _OfLoss(keras.regularizers.Regularizer):
    """A regularizer that reads a private result."""

    def __call__(self, weights):
        return self.model._loss_tracker.result() * keras.ops.sum(weights)


def refused(strategy):
    """Why a step is refused that would read what has no noise."""
    regularizer = _OfLoss()
    with strategy.scope():
        layer = keras.layers.Dense(6, kernel_regularizer=regularizer)
        plain = keras.Sequential([keras.Input((40,)), layer])
        regularizer.model = model = tf_dpsub.make_private(plain)
        model.compile(
            optimizers.DPSGD(
                keras.optimizers.SGD(1.0),
                noise_multiplier=1.0,
                l2_norm_clip=1.0,
                batch_size=EXAMPLES,
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    before = _flat(plain)
    try:
        model.fit(X, Y, verbose=0)
    except tf_dpsub.gradients.ReadsState as error:
        return {"change": (_flat(plain) - before).tolist(), "why": str(error)}
    raise AssertionError("Expected an error, got none.")


def _own_batches(strategy, batch_size):
    """Batches of the examples that one of two workers has, or of all."""
    rows = slice(None)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        task = strategy.cluster_resolver.task_id
        rows = slice(14, None) if task else slice(14)
    return tf_dpsub.data.PoissonBatches(
        X[rows], Y[rows], batch_size=batch_size, total_examples=EXAMPLES
    )


def _flat(model):
    return np.concatenate(
        [np.ravel(v.numpy()) for v in model.trainable_variables]
    )


def all_trained(kind):
    """Results by the names of `MECHANISMS`, and of other ways to train."""
    strategy = _STRATEGIES[kind]()
    results = {
        name: trained(strategy, name, evaluates=name == "DP-SGD")
        for name in MECHANISMS
    }
    results |= {name: drawn(strategy, name) for name in DRAWN}
    results["refused"] = refused(strategy)
    results["own examples, in blocks"] = trained(
        strategy, "DP-SGD", together=2, has_own=True
    )
    results["with noise"] = trained(
        strategy, "DP-SGD", noise=50.0, seed=None, steps=1
    )
    return results


def main(kind):
    print(json.dumps(all_trained(kind)))
