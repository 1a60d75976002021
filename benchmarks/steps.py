"""Training steps that can be timed side by side."""

import contextlib
import functools
import math
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dpsub
from benchmarks.peers import workloads
from tf_dpsub.training import private_batches

# Seconds.
_SHORTEST_BLOCK = 0.1


def built(name):
    """Model of a workload, and its batch.

    Args:
        name: string, one of `benchmarks.peers.workloads.WORKLOADS`.

    Returns:
        Model, inputs and labels.
    """
    workload = workloads.WORKLOADS[name]
    x, y = workloads.data(name)
    if workload.image is not None:
        return _OF_IMAGES[name](), x, y
    if name.startswith("lstm"):
        model = _lstm(workload.vocabulary, workload.tokens, name == "lstm")
        return model, x, y
    padding_mask = np.ones_like(x)
    if workload.is_language_model:
        return (
            _gpt2(workload.vocabulary, workload.tokens),
            {"token_ids": x, "padding_mask": padding_mask},
            y,
        )
    model = bert(
        length=workload.tokens, frozen=workload.trained < workload.parameters
    )
    inputs = {
        "token_ids": x,
        "segment_ids": np.zeros_like(x),
        "padding_mask": padding_mask,
    }
    return model, inputs, y


_OF_IMAGES = {
    "cnn": tf_dpsub.models.mnist_cnn,
    "binary": lambda: tf_dpsub.models.get("mlp", (28, 28, 1), 1),
    "mlp": lambda: tf_dpsub.models.get("mlp", (28, 28, 1), 10),
    "resnet20": tf_dpsub.models.resnet20_gn,
    "wrn28_4": tf_dpsub.models.wrn28_4_gn,
}


def bert(layers=6, width=384, length=64, frozen=True):
    """BERT with a classifier, its embeddings frozen or not."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30_522,
        num_layers=layers,
        num_heads=width // 64,
        hidden_dim=width,
        intermediate_dim=4 * width,
        max_sequence_length=length,
        dropout=0.0,
    )
    for layer in backbone.layers:
        if "embedding" in layer.name:
            layer.trainable = not frozen
    outputs = backbone(backbone.input)["pooled_output"]
    return keras.Model(backbone.input, keras.layers.Dense(2)(outputs))


def bert_data(batch, length, seed=0):
    """Random tokens and labels for `bert`."""
    rng = np.random.default_rng(seed)
    x = {
        "token_ids": rng.integers(0, 30_522, (batch, length)).astype("int32"),
        "segment_ids": np.zeros((batch, length), "int32"),
        "padding_mask": np.ones((batch, length), "int32"),
    }
    return x, rng.integers(0, 2, batch)


def _gpt2(vocabulary, length):
    return tf_dpsub.models.gpt2(
        vocabulary_size=vocabulary,
        num_layers=12,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=length,
        sequence_length=length,
        dropout=0.0,
    )


def _lstm(vocabulary, length, unroll):
    return keras.Sequential(
        [
            keras.Input([length], dtype="int32"),
            keras.layers.Embedding(vocabulary, 64),
            keras.layers.LSTM(128, unroll=unroll),
            keras.layers.Dense(2),
        ]
    )


def step(model, x, y, optimizer, metrics=("accuracy",)):
    """Function that makes one training step, on one batch in memory.

    Args: as `prepared`.

    Returns:
        Function without arguments, which returns the logs of the step.
    """
    return step_of(model, prepared(model, x, y, optimizer, metrics))


def prepared(model, x, y, optimizer, metrics=("accuracy",), jit_compile="auto"):
    """Makes a model ready to train on one batch in memory.

    Args:
        model: `keras.Model`, or a `tf_dpsub.PrivateModel`.
        x: structure of arrays, inputs.
        y: array, labels.
        optimizer: for the model.
        metrics: sequence of strings. Defaults to `("accuracy",)`.
        jit_compile: bool or `"auto"`, as for `compile`. Defaults to `"auto"`.

    Returns:
        A `tf.data.Dataset` without end of what `model.train_step` takes.
    """
    model.compile(
        optimizer,
        loss_of(model),
        metrics=list(metrics),
        jit_compile=jit_compile,
    )
    return batches(model, x, y)


def loss_of(model):
    """The loss of a model of a workload, for `compile`."""
    if model.output_shape[-1] == 1:
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches(model, *data):
    """Makes a compiled model ready to train on one batch in memory.

    Args:
        model: compiled `keras.Model`, or a `tf_dpsub.PrivateModel`.
        *data: inputs, and targets and sample weights if there are any.

    Returns:
        A `tf.data.Dataset` without end of what `model.train_step` takes.
    """
    dataset = tf.data.Dataset.from_tensors(data).repeat()
    if isinstance(model, tf_dpsub.PrivateModel):
        size = len(keras.tree.flatten(data)[0])
        poisson = tf_dpsub.data.PoissonBatches(*data, batch_size=size)
        # All batches have this size: sampling is not measured.
        drawn = private_batches.PrivateBatches.drawn(model, poisson)
        model.prepare_training(drawn.spec)
        given = private_batches.PrivateBatches.given(model, dataset)
        dataset = given.dataset
        model.current_run = _Endless()
    else:
        model.optimizer.build(model.trainable_variables)
    return dataset


def step_of(model, dataset):
    """Function that makes one training step on a dataset of `prepared`."""
    model.make_train_function()
    return functools.partial(model.train_function, iter(dataset))


def epoch_of(model, x, y, steps):
    """Function that trains by `fit`, for an epoch of Poisson batches.

    A plain model takes shuffled batches of a fixed size. The epoch draws from
    the batch, repeated once for each step.

    Args:
        model: compiled `keras.Model`, or a `tf_dpsub.PrivateModel`.
        x: structure of arrays, inputs of a batch of the expected size.
        y: array, labels.
        steps: int, of an epoch.

    Returns:
        Function without arguments, which returns the seconds of a step in the
        mean over the epoch, without what `fit` does before it.
    """
    batch_size = len(y)
    x, y = keras.tree.map_structure(
        lambda a: np.concatenate([a] * steps), (x, y)
    )

    def epoch():
        if isinstance(model, tf_dpsub.PrivateModel):
            model.current_run = None
        clock = _Clock()
        model.fit(
            x,
            y,
            batch_size=batch_size,
            verbose=0,
            callbacks=[clock],
        )
        return clock.seconds / steps

    return epoch


class _Clock(keras.callbacks.Callback):
    """Times an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self._start


class _Endless:
    """A run of `fit` without a last step and without charges."""

    observer = None

    def require_optimizer(self):
        pass

    def require_claims(self, *traced):
        pass

    def take_from(self, iterator):
        pass

    def steps_at_once(self, steps_per_execution):
        return 1

    def charge(self, steps):
        pass

    def one_step(self):
        return contextlib.nullcontext()

    def take_step(self):
        pass


def measure_steps(steps, blocks):
    """Seconds per step of each kind, in blocks of steps that alternate."""
    count = max(_steps_in_a_block(run) for run in steps.values())
    times = {name: [] for name in steps}
    for _ in range(blocks):
        for name, run in steps.items():
            start = time.perf_counter()
            for _ in range(count):
                logs = run()
            float(logs["loss"])
            times[name].append((time.perf_counter() - start) / count)
    return times


def measure_epochs(epochs, blocks):
    """Seconds per step of each kind, in epochs that alternate.

    Args:
        epochs: dict of functions, as `epoch_of` returns them.
        blocks: int, epochs of each kind.
    """
    for epoch in epochs.values():
        epoch()
    times = {name: [] for name in epochs}
    for _ in range(blocks):
        for name, epoch in epochs.items():
            times[name].append(epoch())
    return times


def _steps_in_a_block(run):
    for _ in range(3):
        run()
    start = time.perf_counter()
    float(run()["loss"])
    return math.ceil(_SHORTEST_BLOCK / (time.perf_counter() - start))
