"""Small models, and their true per-example gradients."""

import dataclasses
import functools
from collections.abc import Callable

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from tf_dpsub import gradients
from tf_dpsub.training.per_example_loss import PerExampleLoss

layers = keras.layers

BATCH = 5
CLASSES = 3
VOCABULARY = 20

# The true gradient of a bfloat16 layer is itself a bfloat16 product: 8 bits.
BFLOAT16 = 2e-2

ZOO = {}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A per-example loss, its inputs and the variables to differentiate.

    Args:
        loss_fn: callable from inputs to (losses `[batch]`, aux).
        inputs: nested structure of tensors with leading axis batch.
        variables: list of trainable variables.
        states: list of variables that a call may change (seeds of dropout,
            moving averages). Defaults to `()`.
        positional: bool, whether the loss may depend on an example's place
            in the batch, as dropout does. Then one example alone is one
            whose companions are all zero. Defaults to `False`.
    """

    loss_fn: Callable
    inputs: object
    variables: list
    states: tuple = ()
    positional: bool = False

    @property
    def batch(self):
        return tf.nest.flatten(self.inputs)[0].shape[0]

    @functools.cached_property
    def initial_states(self):
        return [_resource(s).numpy() for s in self.states]

    def restore(self):
        for state, value in zip(self.states, self.initial_states):
            _resource(state).assign(value)

    def alone(self, i):
        """Inputs that hold example `i` only, and its index."""
        if not self.positional:
            return tf.nest.map_structure(lambda t: t[i : i + 1], self.inputs), 0

        def keep(t):
            kept = np.zeros_like(t.numpy())
            kept[i] = t[i]
            return tf.constant(kept)

        return tf.nest.map_structure(keep, self.inputs), i


@dataclasses.dataclass(frozen=True)
class Measured:
    """Results of all methods of `PerExampleGradients`, as NumPy arrays."""

    valid: np.ndarray
    sq_norms: np.ndarray
    sq_norms_of: list
    sq_norm_bounds: np.ndarray
    rows: list
    weighted_sum: list
    gram: np.ndarray


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Args:
        build: callable that returns a fresh `Problem`.
        proved: bool, whether the graph implementation must prove it; where
            `False` it must refuse.
        fallback: str, the implementation that runs it one example at a time:
            `"map_fn"` where `tf.vectorized_map` cannot, and for some loops.
        tolerance: float, the largest relative error.
    """

    build: Callable
    proved: bool
    fallback: str
    tolerance: float


def zoo(proved=True, fallback="vectorized_map", tolerance=1e-5):
    def register(build):
        def seeded():
            # Layers draw the seeds of their weights when they are made.
            keras.utils.set_random_seed(0)
            return build()

        ZOO[build.__name__] = Entry(seeded, proved, fallback, tolerance)
        return build

    return register


def _resource(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable


def _gradient(tape, loss, variables):
    raw = [_resource(v) for v in variables]
    return [
        np.zeros(v.shape, "float32")
        if g is None
        else tf.cast(tf.convert_to_tensor(g), tf.float32).numpy()
        for g, v in zip(tape.gradient(loss, raw), raw)
    ]


def rows_alone(problem):
    """True rows: the gradient of each example's loss, seen alone.

    Returns:
        A list of arrays `[batch, *variable.shape]`, one for each variable.
    """
    rows = []
    for i in range(problem.batch):
        problem.restore()
        inputs, index = problem.alone(i)
        with tf.GradientTape() as tape:
            loss = problem.loss_fn(inputs)[0][index]
        rows.append(_gradient(tape, loss, problem.variables))
    problem.restore()
    return [np.stack(r) for r in zip(*rows)]


def rows_in_batch(problem):
    """Gradient of each example's loss when all are computed together."""
    problem.restore()
    with tf.GradientTape(persistent=True) as tape:
        losses = problem.loss_fn(problem.inputs)[0]
        each = [losses[i] for i in range(problem.batch)]
    rows = [_gradient(tape, loss, problem.variables) for loss in each]
    problem.restore()
    return [np.stack(r) for r in zip(*rows)]


def gradient_of_weighted_loss(problem, coefficients):
    """Gradient of the losses' weighted sum: one backward pass."""
    problem.restore()
    with tf.GradientTape() as tape:
        losses = problem.loss_fn(problem.inputs)[0]
        loss = tf.tensordot(coefficients, losses, 1)
    return _gradient(tape, loss, problem.variables)


def weighted(rows, coefficients):
    return [np.tensordot(coefficients, r, 1) for r in rows]


def norms(rows):
    """Norms of examples over all variables, in float64: `[batch]`."""
    squares = [np.square(r, dtype="float64") for r in rows]
    return np.sqrt(sum(s.reshape(len(s), -1).sum(1) for s in squares))


def coefficients(problem):
    return np.random.default_rng(7).normal(size=problem.batch).astype("float32")


def relative_error(computed, truth):
    """Maximum over variables of ‖computed − truth‖_F / ‖truth‖_F.

    Where the true gradient of a variable vanishes (the bias of attention's
    keys), so that its float32 figure is rounding alone, the denominator is a
    hundredth of the norm of all variables together; where all vanish, 1.
    """
    sizes = [np.linalg.norm(t.astype("float64")) for t in truth]
    total = np.linalg.norm(sizes) or 1.0
    errors = [
        np.linalg.norm(c.astype("float64") - t)
        / (size if size > 1e-6 * total else 0.01 * total)
        for c, t, size in zip(computed, truth, sizes, strict=True)
    ]
    return float(np.max(errors))


def traced(problem, implementation="graph", is_vectorizable=None):
    """A `tf.function` of (inputs, coefficients) that measures a problem."""

    @tf.function(autograph=False)
    def step(inputs, coefficients):
        rows, _ = gradients.per_example_gradients(
            problem.loss_fn,
            inputs,
            problem.variables,
            implementation=implementation,
            is_vectorizable=is_vectorizable,
        )
        return Measured(
            valid=rows.valid,
            sq_norms=rows.sq_norms(),
            sq_norms_of=[rows.sq_norms([v]) for v in problem.variables],
            sq_norm_bounds=rows.sq_norm_bounds(),
            rows=[rows.rows(v) for v in problem.variables],
            weighted_sum=rows.weighted_sum(coefficients),
            gram=rows.gram(),
        ).__dict__

    def run(inputs, coefficients):
        problem.restore()
        outputs = step(inputs, tf.constant(coefficients))
        problem.restore()
        return Measured(**tf.nest.map_structure(lambda t: t.numpy(), outputs))

    return run


def measure(problem, implementation="graph", is_vectorizable=None):
    return traced(problem, implementation, is_vectorizable)(
        problem.inputs, coefficients(problem)
    )


def cross_entropy(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels, tf.cast(logits, tf.float32)
    )


def _vary(variables, rng):
    """Changes weights that are zero or one, which would hide errors."""
    for v in variables:
        v.assign(v + 0.2 * rng.normal(size=v.shape))


def _features(rng, *shape):
    return tf.constant(rng.normal(size=(BATCH, *shape)).astype("float32"))


def _tokens(rng, *shape):
    return tf.constant(rng.integers(1, VOCABULARY, (BATCH, *shape)), tf.int32)


def _labels(rng, *shape):
    return tf.constant(rng.integers(CLASSES, size=(BATCH, *shape)), tf.int32)


def _classifier(model, x, rng, training=False):
    def loss_fn(inputs):
        x, y = inputs
        logits = model(x, training=training)
        return cross_entropy(y, logits), {"logits": logits}

    _vary(model.trainable_variables, rng)
    return Problem(loss_fn, (x, _labels(rng)), model.trainable_variables)


def _start():
    keras.utils.set_random_seed(0)
    return np.random.default_rng(0)


def _sequential(shape, *stack, tokens=False, dtype=None):
    rng = _start()
    dtype = dtype or ("int32" if tokens else None)
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *stack])
    x = _tokens(rng, *shape) if tokens else _features(rng, *shape)
    return _classifier(model, x, rng)


def _head(rank):
    pool = {
        1: layers.GlobalAveragePooling1D,
        2: layers.GlobalAveragePooling2D,
        3: layers.GlobalAveragePooling3D,
    }[rank]
    return layers.Activation("tanh"), pool(), layers.Dense(CLASSES)


def _images(*stack):
    return _sequential((8, 8, 4), *stack, *_head(2))


def _series(*stack, length=7):
    return _sequential((length, 4), *stack, *_head(1))


def _hidden(*stack):
    """A stack between two dense layers."""
    return _sequential((4,), layers.Dense(6), *stack, layers.Dense(CLASSES))


def _attention(x, shapes, rng, call):
    inputs = [keras.Input(shape, dtype=t.dtype) for shape, t in zip(shapes, x)]
    h = layers.GlobalAveragePooling1D()(call(*inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(h))
    return _classifier(model, x, rng)


def _self_attention(layer, **call_options):
    rng = _start()

    def call(i):
        return layer(i, i, **call_options)

    return _attention([_features(rng, 7, 4)], [(7, 4)], rng, call)


@zoo()
def mlp():
    return _sequential(
        (4,),
        layers.Dense(6, activation="tanh"),
        layers.Dense(5, activation="relu", use_bias=False),
        layers.Dense(CLASSES),
    )


@zoo()
def paper_cnn():
    """The network of PDP-SGD, on smaller images and with fewer filters."""
    return _sequential(
        (16, 16, 1),
        layers.Conv2D(4, 8, 2, padding="same", activation="relu"),
        layers.MaxPooling2D(2, 1),
        layers.Conv2D(6, 4, 2, activation="relu"),
        layers.MaxPooling2D(2, 1),
        layers.Flatten(),
        layers.Dense(8, activation="relu"),
        layers.Dense(CLASSES),
    )


def _residual_block(x, width, stride):
    h = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(x)
    h = layers.ReLU()(layers.GroupNormalization(2)(h))
    h = layers.Conv2D(width, 3, padding="same", use_bias=False)(h)
    h = layers.GroupNormalization(2)(h)
    if stride > 1:
        x = layers.Conv2D(width, 1, stride, use_bias=False)(x)
    return layers.ReLU()(layers.Add()([x, h]))


@zoo()
def resnet_group_normalization():
    """One block of ResNet-20 that adds its input, and one that projects it."""
    rng = _start()
    i = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(i)
    x = layers.ReLU()(layers.GroupNormalization(2)(x))
    for width, stride in (4, 1), (8, 2):
        x = _residual_block(x, width, stride)
    x = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
    return _classifier(keras.Model(i, x), _features(rng, 8, 8, 3), rng)


@zoo()
def conv1d():
    return _series(layers.Conv1D(5, 3))


@zoo()
def conv1d_causal():
    """A dilated one behind one that is not."""
    return _series(
        layers.Conv1D(5, 3, padding="causal"),
        layers.Conv1D(6, 3, padding="causal", dilation_rate=2),
    )


@zoo(fallback="map_fn")
def conv1d_grouped():
    return _series(layers.Conv1D(6, 3, groups=2))


@zoo()
def conv1d_transpose():
    return _series(layers.Conv1DTranspose(5, 3, strides=2))


@zoo()
def depthwise_and_separable_conv1d():
    return _series(
        layers.DepthwiseConv1D(3, depth_multiplier=2),
        layers.SeparableConv1D(5, 3),
    )


@zoo()
def conv2d():
    return _images(layers.Conv2D(5, 3, padding="same"))


@zoo()
def conv2d_strided():
    """Behind one whose kernel is a matrix."""
    return _images(
        layers.Conv2D(5, 1),
        layers.Conv2D(6, (3, 2), strides=2, padding="same"),
    )


@zoo()
def conv2d_dilated():
    """With padding, and without."""
    return _images(
        layers.Conv2D(5, 3, dilation_rate=2, padding="same"),
        layers.Conv2D(6, 3, dilation_rate=2),
    )


@zoo(fallback="map_fn")
def conv2d_grouped():
    return _images(layers.Conv2D(6, 3, groups=2))


@zoo()
def conv2d_transpose():
    return _images(layers.Conv2DTranspose(5, 3, strides=2, padding="same"))


@zoo()
def depthwise_conv2d():
    """One that is strided behind one that is not."""
    return _images(
        layers.DepthwiseConv2D(3, depth_multiplier=2),
        layers.DepthwiseConv2D(3, strides=2, padding="same"),
    )


@zoo()
def separable_conv2d():
    return _images(layers.SeparableConv2D(5, 3))


@zoo()
def conv3d():
    """One that is strided behind one that is not."""
    return _sequential(
        (4, 4, 4, 2),
        layers.Conv3D(3, 2),
        layers.Conv3D(4, 2, strides=2, padding="same"),
        *_head(3),
    )


@zoo()
def conv3d_transpose():
    return _sequential((3, 3, 3, 2), layers.Conv3DTranspose(3, 2), *_head(3))


@zoo()
def dense_on_series():
    return _series(layers.Dense(6, activation="gelu"), layers.Dense(5))


@zoo()
def dense_on_images():
    return _images(layers.Dense(6, activation="silu"))


@zoo()
def einsum_dense_plain():
    return _hidden(layers.EinsumDense("ab,bc->ac", 5, bias_axes="c"))


@zoo(fallback="map_fn")
def einsum_dense_split():
    """The projection into heads, and the one back out of them."""
    return _series(
        layers.EinsumDense("btd,dhk->bthk", (7, 2, 3), bias_axes="hk"),
        layers.EinsumDense("bthk,hkd->btd", (7, 4), bias_axes="d"),
    )


@zoo(fallback="map_fn")
def einsum_dense_ellipsis():
    return _images(layers.EinsumDense("...x,xy->...y", 5, bias_axes="y"))


@zoo(fallback="map_fn")
def einsum_dense_over_time():
    """A kernel that mixes positions, and one of its own for each position.

    `vectorized_map` cannot convert the gradient of the first bias.
    """
    return _series(
        layers.EinsumDense("btd,ts->bsd", (5, 4), bias_axes="s"),
        layers.EinsumDense("bsd,sde->bse", (5, 3), bias_axes="se"),
    )


@zoo(fallback="map_fn")
def multi_head_attention_causal():
    layer = layers.MultiHeadAttention(2, 3)
    return _self_attention(layer, use_causal_mask=True)


@zoo(fallback="map_fn")
def multi_head_attention_masked():
    rng = _start()
    mask = tf.constant(rng.random((BATCH, 7, 7)) < 0.7)
    layer = layers.MultiHeadAttention(2, 3)

    def call(x, mask):
        return layer(x, x, attention_mask=mask)

    return _attention([_features(rng, 7, 4), mask], [(7, 4), (7, 7)], rng, call)


@zoo(fallback="map_fn")
def multi_head_attention_cross():
    """Query, value and key of different lengths and widths."""
    rng = _start()
    shapes = (7, 4), (5, 6), (5, 3)
    layer = layers.MultiHeadAttention(2, 3, value_dim=5, output_shape=4)

    def call(query, value, key):
        return layer(query, value, key)

    return _attention([_features(rng, *s) for s in shapes], shapes, rng, call)


@zoo(fallback="map_fn")
def multi_head_attention_padded():
    """The mask that `Embedding(mask_zero=True)` sends along."""
    rng = _start()
    i = keras.Input((7,), dtype="int32")
    h = layers.Embedding(VOCABULARY, 6, mask_zero=True)(i)
    h = layers.MultiHeadAttention(2, 3)(h, h)
    h = layers.GlobalAveragePooling1D()(h)
    model = keras.Model(i, layers.Dense(CLASSES)(h))
    tokens = _tokens(rng, 7).numpy()
    tokens[np.arange(7) > rng.integers(2, 7, (BATCH, 1))] = 0
    return _classifier(model, tf.constant(tokens), rng)


@zoo(fallback="map_fn")
def group_query_attention():
    return _self_attention(layers.GroupQueryAttention(3, 4, 2))


@zoo()
def layer_normalization():
    return _hidden(layers.LayerNormalization())


@zoo()
def layer_normalization_without_a_weight():
    """One without a scale, and one without a center."""
    return _hidden(
        layers.LayerNormalization(scale=False),
        layers.Dense(5),
        layers.LayerNormalization(center=False),
    )


@zoo()
def layer_normalization_of_images():
    return _images(layers.Conv2D(3, 1), layers.LayerNormalization((1, 2, 3)))


@zoo()
def group_normalization():
    return _images(layers.Conv2D(4, 3), layers.GroupNormalization(2))


@zoo()
def group_normalization_of_instances():
    return _images(layers.Conv2D(4, 3), layers.GroupNormalization(-1))


@zoo()
def rms_and_unit_normalization():
    return _hidden(
        layers.RMSNormalization(), layers.Dense(5), layers.UnitNormalization()
    )


@zoo()
def prelu():
    return _hidden(layers.PReLU("uniform"))


@zoo()
def prelu_of_images():
    """One slope for each channel, and one for each number."""
    return _images(
        layers.Conv2D(4, 3),
        layers.PReLU("uniform", shared_axes=[1, 2]),
        layers.Conv2D(6, 3),
        layers.PReLU("uniform"),
    )


@zoo()
def batch_normalization_frozen():
    normalization = layers.BatchNormalization()
    normalization.trainable = False
    return _hidden(normalization)


@zoo()
def embedding():
    return _sequential(
        (7,), layers.Embedding(VOCABULARY, 6), *_head(1), tokens=True
    )


@zoo()
def embedding_mask_zero():
    return _sequential(
        (7,),
        layers.Embedding(VOCABULARY, 6, mask_zero=True),
        layers.Dense(5, activation="tanh"),
        layers.GlobalAveragePooling1D(),
        layers.Dense(CLASSES),
        tokens=True,
    )


@zoo(fallback="map_fn")
def reversible_embedding():
    """A language model whose output kernel is its embedding's transpose."""
    rng = _start()
    embed = keras_hub.layers.ReversibleEmbedding(VOCABULARY, 6)
    i = keras.Input((7,), dtype="int32")
    h = layers.Dense(6, activation="tanh")(embed(i))
    model = keras.Model(i, embed(h, reverse=True))
    return _language_model(model, _tokens(rng, 7), rng)


@zoo(fallback="map_fn")
def lstm():
    return _series(layers.LSTM(3, return_sequences=True))


@zoo(fallback="map_fn")
def recurrent_masked():
    """Padded tokens, both directions, one layer on the other."""
    return _sequential(
        (7,),
        layers.Embedding(VOCABULARY, 4, mask_zero=True),
        layers.Bidirectional(layers.GRU(3, return_sequences=True)),
        layers.SimpleRNN(3, go_backwards=True),
        layers.Dense(CLASSES),
        tokens=True,
    )


@zoo(fallback="map_fn")
def conv_lstm():
    return _sequential(
        (3, 5, 5, 2),
        layers.ConvLSTM2D(2, 3),
        layers.Flatten(),
        layers.Dense(CLASSES),
    )


@zoo()
def recurrent_unrolled():
    options = {"unroll": True, "return_sequences": True}
    return _series(
        layers.LSTM(3, **options),
        layers.GRU(4, **options),
        layers.Bidirectional(layers.SimpleRNN(3, **options)),
        length=3,
    )


@zoo()
def time_distributed():
    return _series(layers.TimeDistributed(layers.Dense(5)))


def _with_lora(build_layer, build_problem):
    """A model whose layer is trained through its low-rank update only."""
    rng = _start()
    layer = build_layer()
    model, x = build_problem(layer, rng)
    layer.enable_lora(2)
    return _classifier(model, x, rng)


@zoo()
def lora_dense():
    def problem(layer, rng):
        stack = keras.Input((4,)), layer, layers.Dense(CLASSES)
        return keras.Sequential(stack), _features(rng, 4)

    return _with_lora(lambda: layers.Dense(6, activation="tanh"), problem)


@zoo(fallback="map_fn")
def lora_einsum_dense():
    def problem(layer, rng):
        stack = keras.Input((7, 4)), layer, layers.Flatten()
        model = keras.Sequential([*stack, layers.Dense(CLASSES)])
        return model, _features(rng, 7, 4)

    return _with_lora(
        lambda: layers.EinsumDense("btd,dhk->bthk", (7, 2, 3)), problem
    )


@zoo(fallback="map_fn")
def lora_embedding():
    def problem(layer, rng):
        stack = keras.Input((7,), dtype="int32"), layer, *_head(1)
        return keras.Sequential(stack), _tokens(rng, 7)

    return _with_lora(lambda: layers.Embedding(VOCABULARY, 6), problem)


@zoo()
def lora_conv2d():
    def problem(layer, rng):
        stack = keras.Input((8, 8, 4)), layer, *_head(2)
        return keras.Sequential(stack), _features(rng, 8, 8, 4)

    return _with_lora(lambda: layers.Conv2D(5, 3), problem)


class Gated(layers.Layer):
    """A user's layer: a gate on a projection, a scale and a shift."""

    def build(self, input_shape):
        shape = (input_shape[-1], input_shape[-1])
        self.kernel = self.add_weight(shape=shape)
        self.gate = self.add_weight(shape=shape)
        self.scale = self.add_weight(shape=(1,), initializer="ones")
        self.shift = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x):
        opened = keras.ops.sigmoid(keras.ops.matmul(x, self.gate))
        h = opened * keras.ops.matmul(x, self.kernel)
        return x + self.scale * h - self.shift


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = layers.Dense(6)
        self.gated = [Gated() for _ in range(2)]
        self.head = layers.Dense(CLASSES)

    def call(self, x):
        h = self.embed(x)
        for layer in self.gated:
            h = layer(h)
        return self.head(h)


@zoo()
def subclassed():
    rng = _start()
    model, x = Subclassed(), _features(rng, 4)
    model(x)
    return _classifier(model, x, rng)


@zoo()
def shared_layer():
    """One layer called twice in a chain, and once more beside it."""
    rng = _start()
    shared = layers.Dense(4, activation="tanh")
    i = keras.Input((4,))
    h = layers.Concatenate()([shared(shared(i)), shared(2 * i)])
    model = keras.Model(i, layers.Dense(CLASSES)(h))
    return _classifier(model, _features(rng, 4), rng)


@zoo()
def two_inputs_two_outputs():
    rng = _start()
    a, b = keras.Input((4,), name="a"), keras.Input((7, 3), name="b")
    h = layers.Dense(5, activation="tanh")(a)
    h = layers.Concatenate()([h, layers.Flatten()(layers.Conv1D(2, 3)(b))])
    model = keras.Model(
        {"a": a, "b": b},
        {"class": layers.Dense(CLASSES)(h), "value": layers.Dense(1)(h)},
    )
    _vary(model.trainable_variables, rng)
    inputs = (
        {"a": _features(rng, 4), "b": _features(rng, 7, 3)},
        {"class": _labels(rng), "value": _features(rng, 1)},
    )

    def loss_fn(inputs):
        x, y = inputs
        outputs = model(x, training=False)
        error = tf.reduce_mean((outputs["value"] - y["value"]) ** 2, -1)
        losses = cross_entropy(y["class"], outputs["class"]) + 0.3 * error
        return losses, outputs

    return Problem(loss_fn, inputs, model.trainable_variables)


@zoo()
def tensorflow_variables():
    """Weights that Keras does not know."""
    rng = _start()
    kernel = tf.Variable(rng.normal(size=(4, CLASSES)).astype("float32"))
    bias = tf.Variable(rng.normal(size=(CLASSES,)).astype("float32"))

    def loss_fn(inputs):
        x, y = inputs
        return cross_entropy(y, tf.matmul(x, kernel) + bias), None

    return Problem(loss_fn, (_features(rng, 4), _labels(rng)), [kernel, bias])


def _with_loss(loss, labels=_labels, shape=(4,)):
    """A model trained by a loss of Keras, as `compile` takes it."""
    rng = _start()
    model = keras.Sequential([keras.Input(shape), layers.Dense(CLASSES)])
    per_example = PerExampleLoss(CompileLoss(loss))

    def loss_fn(inputs):
        x, y = inputs
        outputs = model(x)
        return per_example(y, outputs)[0], {"outputs": outputs}

    variables = model.trainable_variables
    _vary(variables, rng)
    return Problem(loss_fn, (_features(rng, *shape), labels(rng)), variables)


def _zeros_and_ones(rng):
    labels = rng.integers(2, size=(BATCH, CLASSES))
    return tf.constant(labels.astype("float32"))


@zoo()
def binary_cross_entropy_of_logits():
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return _with_loss(loss, _zeros_and_ones)


@zoo()
def binary_focal_cross_entropy():
    loss = keras.losses.BinaryFocalCrossentropy(
        apply_class_balancing=True, from_logits=True
    )
    return _with_loss(loss, _zeros_and_ones)


@zoo()
def squared_hinge():
    """Two examples of -1 and 1, three of 0 and 1: each by its own labels."""

    def labels(rng):
        labels = rng.integers(2, size=(BATCH, CLASSES)).astype("float32")
        labels[:2] = 2 * labels[:2] - 1
        return tf.constant(labels)

    return _with_loss("squared_hinge", labels)


@zoo(proved=False, fallback="map_fn")
def connectionist_temporal_classification():
    def labels(rng):
        return tf.constant(rng.integers(1, CLASSES, [BATCH, 2]), tf.int32)

    return _with_loss(keras.losses.CTC(), labels, (6, 4))


@zoo()
def adaptive_pooling():
    return _images(
        layers.AdaptiveAveragePooling2D(3), layers.AdaptiveMaxPooling2D(2)
    )


@zoo()
def images_cropped_alike():
    """At a place that is drawn once for all of them."""
    rng = _start()
    stack = layers.RandomCrop(6, 6, seed=1), layers.Conv2D(4, 3), *_head(2)
    model = keras.Sequential([keras.Input((8, 8, 3)), *stack])
    problem = _classifier(model, _features(rng, 8, 8, 3), rng, training=True)
    return dataclasses.replace(
        problem, states=tuple(model.non_trainable_variables)
    )


def _sentences(rng, length=6):
    padding = np.arange(length) < rng.integers(2, length + 1, (BATCH, 1))
    return {
        "token_ids": _tokens(rng, length),
        "padding_mask": tf.constant(padding.astype("int32")),
    }


def _language_model(model, x, rng):
    def loss_fn(inputs):
        x, y = inputs
        logits = model(x, training=False)
        return tf.reduce_mean(cross_entropy(y, logits), -1), {"logits": logits}

    _vary(model.trainable_variables, rng)
    length = tf.nest.flatten(x)[0].shape[1]
    labels = _tokens(rng, length)
    return Problem(loss_fn, (x, labels), model.trainable_variables)


@zoo(fallback="map_fn")
def bert():
    rng = _start()
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        max_sequence_length=6,
    )
    h = backbone(backbone.input)["pooled_output"]
    model = keras.Model(backbone.input, layers.Dense(CLASSES)(h))
    x = _sentences(rng)
    x["segment_ids"] = tf.constant(rng.integers(2, size=(BATCH, 6)), tf.int32)
    return _classifier(model, x, rng)


@zoo(fallback="map_fn")
def gpt2_tied():
    rng = _start()
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        max_sequence_length=6,
    )
    h = backbone(backbone.input)
    logits = backbone.token_embedding(h, reverse=True)
    model = keras.Model(backbone.input, logits)
    return _language_model(model, _sentences(rng), rng)


@zoo(tolerance=BFLOAT16)
def mlp_mixed_bfloat16():
    policy = "mixed_bfloat16"
    return _sequential(
        (4,),
        layers.Dense(6, activation="tanh", dtype=policy),
        layers.Dense(CLASSES, dtype=policy),
    )


@zoo(tolerance=BFLOAT16)
def cnn_mixed_bfloat16():
    policy = "mixed_bfloat16"
    return _sequential(
        (8, 8, 2),
        layers.Conv2D(4, 3, activation="tanh", dtype=policy),
        layers.GroupNormalization(2, dtype=policy),
        layers.Flatten(dtype=policy),
        layers.Dense(CLASSES, dtype=policy),
    )
