"""Times training steps by TensorFlow Privacy, and by the Keras 2 that it needs.

    python -m benchmarks.peers.tensorflow_privacy_steps --workload=cnn \
        --method=dp_model

All methods call the `train_function` of a Keras model, which is compiled by
`tf.function`, without XLA, on one batch in memory:

- `plain`: Keras's own step.
- `dp_model`: `DPModel`, for which `tf.vectorized_map` makes the gradients of
  all examples at once.
- `ghost`: `DPModel` with the default registry of layers, and with the library's
  own rules for normalization and attention added to it: a first backward pass
  finds the norms, from inputs of layers and gradients of their outputs, and a
  second one weights the losses so that gradients are clipped.

Epochs are those of `fit`, which shuffles: the library has no Poisson sampling.
"""

import functools
import time

import keras
import numpy as np
import tensorflow as tf
import tensorflow_privacy
from keras import layers
from tensorflow_privacy.privacy.fast_gradient_clipping import (
    clip_grads,
    gradient_clipping_utils,
    layer_registry,
)
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (  # noqa: E501
    layer_normalization,
    multi_head_attention,
)

from benchmarks.peers import timing, workloads

METHODS = ("plain", "dp_model", "ghost")
_CLIP_NORM, _NOISE_MULTIPLIER, _LEARNING_RATE = 1.0, 1.0, 0.01
_STAGES = 3


def built(workload, method):
    """Builds the step for `timing.main`."""
    model, x, y, *counts = _prepared(workload, method)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
    step = functools.partial(model.make_train_function(), iter(dataset))
    return lambda: float(step()["loss"]), *counts


def built_epoch(workload, method):
    """Builds the epoch for `timing.main`."""
    model, x, y, *counts = _prepared(workload, method)
    sizes = workloads.WORKLOADS[workload]
    x, y = (np.concatenate([a] * sizes.steps_of_epoch) for a in (x, y))

    def epoch():
        clock = _Clock()
        model.fit(x, y, batch_size=sizes.batch, verbose=0, callbacks=[clock])
        return clock.seconds

    return epoch, *counts


def _prepared(workload, method):
    """Model and batch of a workload, and numbers of parameters."""
    model = new_model(workload, method)
    x, y = workloads.data(workload)
    if method == "ghost":
        _require_rules(model, x, y)
    counts = _counts(model.weights), _counts(model.trainable_weights)
    return model, x, y, *counts


class _Clock(keras.callbacks.Callback):
    """Times an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self._start


def new_model(workload, method):
    """Compiled model of a workload.

    Args:
        workload: string, one of `benchmarks.peers.workloads.WORKLOADS`.
        method: string, one of `METHODS`.

    Returns:
        `keras.Model`, from images `[batch, height, width, channels]` or tokens
        `[batch, tokens]` to logits `[batch, classes]`, of a language model
        `[batch, tokens, classes]`.
    """
    sizes = workloads.WORKLOADS[workload]
    if sizes.image is not None:
        inputs = keras.Input(sizes.image)
        outputs = _OF_IMAGES[workload](inputs)
    else:
        inputs = keras.Input((sizes.tokens,), dtype="int32")
        outputs = _of_text(workload, inputs)
    if method == "plain":
        model = keras.Model(inputs, outputs)
    else:
        model = tensorflow_privacy.DPModel(
            l2_norm_clip=_CLIP_NORM,
            noise_multiplier=_NOISE_MULTIPLIER,
            # On a CPU XLA is slower, and it has no kernel for some models.
            use_xla=False,
            layer_registry=_rules() if method == "ghost" else None,
            inputs=inputs,
            outputs=outputs,
        )
    model.compile(
        keras.optimizers.SGD(_LEARNING_RATE),
        keras.losses.BinaryCrossentropy(from_logits=True)
        if sizes.one_logit
        else keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _rules():
    registry = layer_registry.make_default_layer_registry()
    registry.insert(
        layers.LayerNormalization,
        layer_normalization.layer_normalization_computation,
    )
    registry.insert(
        layers.MultiHeadAttention,
        multi_head_attention.multi_head_attention_layer_computation,
    )
    return registry


def _require_rules(model, x, y):
    """Makes the library raise its own error if it has no rule for a layer.

    Otherwise it would only log, and do what `dp_model` measures.
    """
    rules = _rules()
    if not gradient_clipping_utils.all_trainable_layers_are_registered(
        model, rules
    ):
        clip_grads.compute_gradient_norms(model, rules, x[:1], y[:1])


def _counts(weights):
    return sum(w.shape.num_elements() for w in weights)


def _cnn(x):
    x = layers.Conv2D(16, 8, 2, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D(2, 1)(x)
    x = layers.Conv2D(32, 4, 2, activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(2, 1)(x))
    return layers.Dense(10)(layers.Dense(32, activation="relu")(x))


def _mlp(x, outputs=10):
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dense(128, activation="relu")(x)
    return layers.Dense(outputs)(x)


def _binary(x):
    return _mlp(x, outputs=1)


def _resnet20(x):
    x = layers.ReLU()(_norm(_conv(x, 16), 4))
    return _classifier(_stages(x, _block, width=1, blocks=3, groups=4))


def _wrn28_4(x):
    x = _conv(x, 16)
    x = _stages(x, _preactivated_block, width=4, blocks=4, groups=16)
    return _classifier(layers.ReLU()(_norm(x, 16)))


_OF_IMAGES = {
    "cnn": _cnn,
    "binary": _binary,
    "mlp": _mlp,
    "resnet20": _resnet20,
    "wrn28_4": _wrn28_4,
}


def _stages(x, block, width, blocks, groups):
    for stage in range(_STAGES):
        for i in range(blocks):
            strides = 2 if stage > 0 and i == 0 else 1
            x = block(x, 16 * width * 2**stage, strides, groups)
    return x


def _block(x, filters, strides, groups):
    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        shortcut = _norm(_conv(x, filters, 1, strides), groups)
    x = layers.ReLU()(_norm(_conv(x, filters, strides=strides), groups))
    x = _norm(_conv(x, filters), groups)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def _preactivated_block(x, filters, strides, groups):
    shortcut = x
    x = layers.ReLU()(_norm(x, groups))
    if strides != 1 or x.shape[-1] != filters:
        shortcut = _conv(x, filters, 1, strides)
    x = _conv(x, filters, strides=strides)
    x = layers.ReLU()(_norm(x, groups))
    return layers.Add()([_conv(x, filters), shortcut])


def _conv(x, filters, size=3, strides=1):
    return layers.Conv2D(
        filters,
        size,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )(x)


def _norm(x, groups):
    return layers.GroupNormalization(groups)(x)


def _classifier(x):
    return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


def _of_text(workload, tokens):
    sizes = workloads.WORKLOADS[workload]
    if workload.startswith("lstm"):
        return _lstm(tokens, sizes.vocabulary, workload == "lstm")
    if sizes.is_language_model:
        return _gpt2(tokens, sizes.vocabulary)
    return _bert(tokens, sizes.vocabulary, sizes.trained == sizes.parameters)


def _lstm(tokens, vocabulary, unroll):
    x = layers.Embedding(vocabulary, 64)(tokens)
    # As a loop the layer is slower, and `tf.vectorized_map` fails on it.
    return layers.Dense(2)(layers.LSTM(128, unroll=unroll)(x))


def _bert(tokens, vocabulary, train_embeddings, width=384, blocks=6):
    tables = (
        (vocabulary, tokens),
        (tokens.shape[1], _positions(tokens)),
        (2, tf.zeros_like(tokens)),
    )
    embeddings = [
        layers.Embedding(rows, width, trainable=train_embeddings)(indices)
        for rows, indices in tables
    ]
    x = layers.LayerNormalization(epsilon=1e-12, trainable=train_embeddings)(
        layers.Add()(embeddings)
    )
    for _ in range(blocks):
        attention = layers.MultiHeadAttention(width // 64, 64)(x, x)
        x = layers.LayerNormalization(epsilon=1e-12)(
            layers.Add()([x, attention])
        )
        x = layers.LayerNormalization(epsilon=1e-12)(
            layers.Add()([x, _feed_forward(x)])
        )
    pooled = layers.Dense(width, activation="tanh")(x[:, 0])
    return layers.Dense(2)(pooled)


def _gpt2(tokens, vocabulary, width=768, blocks=12):
    embedding = TiedEmbedding(vocabulary, width)
    positions = layers.Embedding(tokens.shape[1], width)(_positions(tokens))
    x = layers.Add()([embedding(tokens), positions])
    for _ in range(blocks):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        y = layers.MultiHeadAttention(width // 64, 64)(
            y, y, use_causal_mask=True
        )
        x = layers.Add()([x, y])
        y = _feed_forward(layers.LayerNormalization(epsilon=1e-5)(x))
        x = layers.Add()([x, y])
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return embedding(x, reverse=True)


def _positions(tokens):
    # The same in each example: gradients need the axis of examples.
    return tf.zeros_like(tokens) + tf.range(tokens.shape[1])


def _feed_forward(x):
    width = x.shape[-1]
    activation = functools.partial(keras.activations.gelu, approximate=True)
    x = layers.Dense(4 * width, activation=activation)(x)
    return layers.Dense(width)(x)


class TiedEmbedding(layers.Layer):
    """Vectors of tokens, and logits as products with these vectors.

    Args:
        vocabulary: int.
        width: int.
    """

    def __init__(self, vocabulary, width):
        super().__init__()
        self._vectors = self.add_weight(
            shape=(vocabulary, width),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )

    def call(self, x, reverse=False):
        if reverse:
            return tf.matmul(x, self._vectors, transpose_b=True)
        return tf.nn.embedding_lookup(self._vectors, x)


if __name__ == "__main__":
    timing.main(
        "TensorFlow Privacy",
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"TensorFlow Privacy {tensorflow_privacy.__version__}",
        METHODS,
        built,
        built_epoch,
    )
