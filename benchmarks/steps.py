"""Training steps that can be timed side by side."""

import functools
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dpsub


def cnn():
    """The 26,010-parameter network of the PDP-SGD paper, batch 250."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(250, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, 250)
    return tf_dpsub.models.mnist_cnn(), x, y, 20


def resnet20():
    """ResNet-20 with GroupNorm, batch 256."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 32, 32, 3)).astype("float32")
    y = rng.integers(0, 10, 256)
    return tf_dpsub.models.resnet20_gn(), x, y, 1


def bert(layers=6, width=384, length=64):
    """BERT with 6 layers of width 384, embeddings frozen, batch 32 x 64."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30522,
        num_layers=layers,
        num_heads=width // 64,
        hidden_dim=width,
        intermediate_dim=4 * width,
        max_sequence_length=length,
        dropout=0.0,
    )
    for layer in backbone.layers:
        if "embedding" in layer.name:
            layer.trainable = False
    outputs = backbone(backbone.input)["pooled_output"]
    model = keras.Model(backbone.input, keras.layers.Dense(2)(outputs))
    rng = np.random.default_rng(0)
    x = {
        "token_ids": rng.integers(0, 30522, (32, length)).astype("int32"),
        "segment_ids": np.zeros((32, length), "int32"),
        "padding_mask": np.ones((32, length), "int32"),
    }
    return model, x, rng.integers(0, 2, 32), 1


def wrn28_4():
    """WRN-28-4 with GroupNorm, batch 64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 32, 32, 3)).astype("float32")
    y = rng.integers(0, 10, 64)
    return tf_dpsub.models.wrn28_4_gn(), x, y, 1


def step(model, x, y, optimizer, batch):
    """A function that makes one training step, on one batch in memory."""
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    private = isinstance(model, tf_dpsub.PrivateModel)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
    if private:
        batches = tf_dpsub.data.PoissonBatches(x, y, batch_size=batch)
        # As large as every batch here: sampling is not what is measured.
        model.prepare_training(model._distributed(batches).element_spec)
        dataset = model._dataset_of_batches(dataset)
        model.current_run = _Endless()
        model._charge = lambda steps: None
    else:
        model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    iterator = iter(dataset)
    return functools.partial(model.train_function, iterator)


class _Endless:
    left = None


def measure_steps(steps, count, blocks):
    """Seconds a step of each kind: blocks alternate."""
    for run in steps.values():
        for _ in range(3):
            run()
    times = {name: [] for name in steps}
    for _ in range(blocks):
        for name, run in steps.items():
            start = time.perf_counter()
            for _ in range(count):
                logs = run()
            float(logs["loss"])
            times[name].append((time.perf_counter() - start) / count)
    return times
