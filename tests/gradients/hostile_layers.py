"""Layers that could fool a walk over the graph, and their expected outcomes.

Each case is a function of a layer and its input. Sizes collide on purpose: the
batch, the sequence and the features are all six, so that no shape tells one
axis from another.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tests.gradients import model_zoo

SIZE = 6  # of the batch, of a sequence and of the features
CLASSES = 3

CASES = {}

# Expected outcomes of a case.
PROVED = "proved"  # the graph implementation must give the truth
EITHER = "either"  # it may give the truth or raise Unproven
REFUSED = "refused"  # nothing is mixed, but it must raise Unproven
MIXES = "mixes"  # examples are mixed: it must raise Unproven
STATE = "state"  # a state learns of the batch: it must raise UpdatesState
RAISES = "raises"  # both of the last two: either exception will do


@dataclasses.dataclass(frozen=True)
class Case:
    """A hostile layer, or a hostile reduction of the losses.

    Args:
        function: callable. Of (layer, x) to `[batch, 6]`; of (layer, losses,
            x, y) to losses where `on_losses`.
        expected: str, one of the outcomes above.
        kernels: int, number of kernels `[6, 6]` that the layer owns.
        inputs: str, `"vectors"` `[6, 6]`, `"sequences"` `[6, 6, 6]`,
            `"images"` `[6, 6, 6, 6]` or `"ids"` `[6, 6]`.
        positional: bool, whether public randomness or a public table makes
            an example's loss depend on its place in the batch.
        on_losses: bool, whether the function reduces losses.
    """

    function: Callable
    expected: str
    kernels: int
    inputs: str
    positional: bool
    on_losses: bool

    def problem(self, detached=False):
        """Builds a fresh `Problem` of this case.

        Args:
            detached: bool, whether no gradient passes through the layer, so
                that its forward pass alone can give it away. Defaults to
                `False`.
        """
        keras.utils.set_random_seed(3)
        rng = np.random.default_rng(3)
        layer = HostileLayer(self)
        head = keras.layers.Dense(CLASSES)
        x = _inputs(self.inputs, rng)
        y = tf.constant(rng.integers(CLASSES, size=SIZE), tf.int32)
        layer.build(x.shape)
        head.build((SIZE, SIZE))

        def loss_fn(inputs):
            x, y = inputs
            h = layer(x)
            if detached:
                h = tf.stop_gradient(h)
            losses = model_zoo.cross_entropy(y, head(h))
            if self.on_losses:
                losses = self.function(layer, losses, x, y)
            return losses, None

        return model_zoo.Problem(
            loss_fn,
            (x, y),
            layer.trainable_variables + head.trainable_variables,
            states=(
                *layer.variables,
                *layer.meter.variables,
                layer.hidden,
                layer.generator.state,
            ),
            positional=self.positional,
        )


class HostileLayer(keras.layers.Layer):
    """Layer with all that cases use: kernels, states, a seed, a hidden one."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.seed = keras.random.SeedGenerator(1)
        self.meter = keras.metrics.Mean()
        self.normalization = keras.layers.BatchNormalization(
            center=False, scale=False
        )

    def build(self, input_shape):
        self.kernels = [
            self.add_weight(
                shape=(SIZE, SIZE),
                initializer=keras.initializers.RandomNormal(stddev=0.5, seed=k),
            )
            for k in range(self.case.kernels)
        ]
        self.state = self.add_weight(
            shape=(SIZE,), initializer="ones", trainable=False
        )
        self.normalization.build((SIZE, SIZE))
        # Keras does not track a bare tf.Variable, nor a generator.
        self.hidden = tf.Variable(tf.ones(SIZE), trainable=False)
        self.generator = tf.random.Generator.from_seed(1)
        self.table = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.float32, 0.0
        )
        self.queue = tf.queue.FIFOQueue(100, tf.float32)

    def lookup_table(self, keys, values):
        """A table that never changes, created outside of any graph."""
        with tf.init_scope():
            if not hasattr(self, "_lookup_table"):
                initializer = tf.lookup.KeyValueTensorInitializer(
                    tf.constant(keys, tf.int32), tf.constant(values, tf.int32)
                )
                self._lookup_table = tf.lookup.StaticHashTable(initializer, 0)
        return self._lookup_table

    @property
    def kernel(self):
        return self.kernels[0].value

    @property
    def second(self):
        return self.kernels[1].value

    def call(self, x):
        if self.case.on_losses:
            return tf.matmul(x, self.kernel)
        return self.case.function(self, x)


def hostile(
    expected,
    kernels=1,
    inputs="vectors",
    positional=False,
    on_losses=False,
):
    def register(function):
        CASES[function.__name__] = Case(
            function, expected, kernels, inputs, positional, on_losses
        )
        return function

    return register


def _inputs(kind, rng):
    if kind == "ids":
        return tf.constant(rng.integers(SIZE, size=(SIZE, SIZE)), tf.int32)
    rank = {"vectors": 2, "sequences": 3, "images": 4}[kind]
    return tf.constant(rng.normal(size=[SIZE] * rank).astype("float32"))


def _batch(x):
    return x.shape[0]


# The weight's side: nothing is mixed, the gradient is easily got wrong.


@hostile(PROVED)
def kernel_plus_zero(layer, x):
    return x @ (layer.kernel + 0.0)


@hostile(PROVED, kernels=2)
def product_of_kernels(layer, x):
    return x @ (layer.kernel @ layer.second)


@hostile(PROVED)
def transposed_kernel(layer, x):
    return x @ tf.transpose(layer.kernel)


@hostile(PROVED)
def kernel_shared_transposed(layer, x):
    return tf.tanh(x @ layer.kernel) @ tf.transpose(layer.kernel)


@hostile(PROVED)
def weight_normalization(layer, x):
    return x @ (layer.kernel / tf.norm(layer.kernel, axis=0))


@hostile(PROVED)
def spectral_normalization(layer, x):
    u = tf.linalg.normalize(layer.kernel @ tf.ones([SIZE, 1]))[0]
    v = tf.linalg.normalize(tf.transpose(layer.kernel) @ u)[0]
    return x @ (layer.kernel / tf.reduce_sum(u * (layer.kernel @ v)))


@hostile(PROVED)
def read_twice(layer, x):
    return tf.tanh(x @ layer.kernel) @ layer.kernel


@hostile(PROVED)
def unrolled_loop(layer, x):
    for _ in range(3):
        x = tf.tanh(x @ layer.kernel)
    return x


@hostile(PROVED, inputs="ids")
def tied_embedding(layer, x):
    h = tf.tanh(tf.reduce_mean(keras.ops.take(layer.kernels[0], x, axis=0), 1))
    return h @ tf.transpose(layer.kernel)


@hostile(PROVED, inputs="ids")
def embedding_of_two_sites(layer, x):
    first = keras.ops.take(layer.kernels[0], x[:, 0], axis=0)
    each = keras.ops.take(layer.kernels[0], x, axis=0)  # [batch, 6, 6]
    return tf.tanh(first) * tf.reduce_max(each, 1)


@hostile(PROVED)
def position_embedding(layer, x):
    return tf.tanh(x + tf.broadcast_to(layer.kernel[:1], x.shape))


@hostile(PROVED)
def kernel_without_gradient(layer, x):
    return x + 0.0 * tf.stop_gradient(layer.kernel[0])


@hostile(PROVED)
def state_counts_steps(layer, x):
    layer.state.assign(layer.state + 1.0)
    return x @ layer.kernel


@hostile(PROVED)
def state_averages_kernel(layer, x):
    average = 0.9 * layer.state + 0.1 * tf.reduce_mean(layer.kernel, 0)
    layer.state.assign(average)
    return x @ layer.kernel + average


@hostile(EITHER)
def straight_through(layer, x):
    rounded = tf.round(layer.kernel * 8.0) / 8.0
    return x @ (layer.kernel + tf.stop_gradient(rounded - layer.kernel))


@hostile(EITHER)
def half_stopped_kernel(layer, x):
    frozen = tf.stop_gradient(layer.kernel)
    return x @ frozen + 0.1 * (x @ layer.kernel)


@hostile(EITHER)
def softmax_of_kernel(layer, x):
    return x @ tf.nn.softmax(layer.kernel)


@hostile(EITHER)
def sorted_kernel(layer, x):
    return x @ tf.cumsum(tf.sort(layer.kernel, axis=0), axis=1)


@hostile(EITHER)
def kernel_in_double_precision(layer, x):
    h = tf.cast(x, tf.float64) @ tf.cast(layer.kernel, tf.float64)
    return tf.cast(h, tf.float32)


@hostile(EITHER)
def kernel_power_by_loop(layer, x):
    power = tf.while_loop(
        lambda i, w: i < 3,
        lambda i, w: (i + 1, tf.tanh(w @ layer.kernel)),
        (0, tf.eye(SIZE)),
    )[1]
    return x @ power


@hostile(EITHER)
def circulant_kernel(layer, x):
    spectrum = tf.signal.rfft(x) * tf.signal.rfft(layer.kernel[0])
    return tf.signal.irfft(spectrum, [SIZE])


@hostile(EITHER)
def dropped_connections(layer, x):
    mask = keras.random.dropout(tf.ones([SIZE, SIZE]), 0.5, seed=layer.seed)
    return x @ (layer.kernel * mask)


@hostile(EITHER, positional=True)
def connections_dropped_for_each(layer, x):
    ones = tf.ones([_batch(x), SIZE, SIZE])
    kernels = layer.kernel * keras.random.dropout(ones, 0.5, seed=layer.seed)
    return tf.squeeze(x[:, None] @ kernels, 1)


@hostile(EITHER)
def kernel_stacked_over_batch(layer, x):
    kernels = tf.stack([layer.kernel] * _batch(x))
    return tf.squeeze(x[:, None] @ kernels, 1)


@hostile(EITHER)
def bias_tiled_over_batch(layer, x):
    return tf.tanh(x + tf.tile(layer.kernel[:1], [_batch(x), 1]))


@hostile(EITHER, positional=True)
def parameter_for_each_place(layer, x):
    return tf.tanh(x + layer.kernel[: _batch(x)])


@hostile(EITHER, positional=True)
def table_read_by_place(layer, x):
    return tf.tanh(x + tf.gather(layer.kernel, tf.range(_batch(x))))


@hostile(EITHER, inputs="ids")
def embedding_read_from_resource(layer, x):
    return tf.reduce_mean(tf.nn.embedding_lookup(layer.kernel, x), 1)


@hostile(EITHER, inputs="ids")
def embedding_along_second_axis(layer, x):
    h = tf.gather(layer.kernel, x, axis=1)  # [6, batch, 6]
    return tf.transpose(tf.reduce_max(tf.tanh(h), 2))


@hostile(EITHER, inputs="ids")
def embedding_by_one_hot(layer, x):
    return tf.reduce_mean(tf.one_hot(x, SIZE) @ layer.kernel, 1)


@hostile(EITHER, kernels=2)
def generated_kernel(layer, x):
    columns = tf.tanh(x @ layer.kernel)[:, :, None]
    rows = tf.tanh(x @ layer.second)[:, None]
    return tf.squeeze(x[:, None] @ (columns * rows), 1)


@hostile(EITHER)
def bilinear(layer, x):
    return x * tf.einsum("bi,bj,ij->b", x, x, layer.kernel)[:, None]


@hostile(REFUSED)
def custom_gradient_on_kernel(layer, x):
    @tf.custom_gradient
    def doubled(w):
        return tf.identity(w), lambda d: 2.0 * d

    return x @ doubled(layer.kernel)


@hostile(REFUSED)
def custom_gradient_with_variables(layer, x):
    @tf.custom_gradient
    def project(z):
        def gradient(d, variables=None):
            kernel = 3.0 * tf.matmul(z, d, transpose_a=True)
            return d @ tf.transpose(layer.kernel), [kernel]

        return z @ layer.kernel, gradient

    return project(x)


@hostile(EITHER)
def recomputed_gradient(layer, x):
    return tf.recompute_grad(lambda z: tf.tanh(z @ layer.kernel))(x)


# Functions, branches and loops, in which reads of the weight may hide.


@hostile(EITHER)
def nested_function(layer, x):
    return tf.function(lambda z: z @ layer.kernel)(x)


@hostile(EITHER)
def nested_functions(layer, x):
    inner = tf.function(lambda z: tf.tanh(z @ layer.kernel))
    return tf.function(lambda z: inner(inner(z)))(x)


@hostile(EITHER)
def branch_on_kernel(layer, x):
    return tf.cond(
        tf.reduce_sum(layer.kernel) > -1e9,
        lambda: x @ layer.kernel,
        lambda: x,
    )


@hostile(EITHER)
def loop_that_reads_kernel(layer, x):
    return keras.ops.fori_loop(0, 3, lambda i, z: tf.tanh(z @ layer.kernel), x)


@hostile(PROVED)
def loop_around_kernel(layer, x):
    kernel = layer.kernel * 1.0
    return keras.ops.fori_loop(0, 3, lambda i, z: tf.tanh(z @ kernel), x)


@hostile(PROVED)
def scan_over_depth(layer, x):
    def step(carry, _):
        return tf.tanh(carry @ layer.kernel), carry

    return keras.ops.scan(step, x, keras.ops.arange(3))[0]


def _steps(body, *initial, count=3):
    """Last values of variables that a loop carries."""
    return tf.while_loop(
        lambda i, *_: i < count,
        lambda i, *carried: (i + 1, *body(i, *carried)),
        (0, *initial),
    )[1:]


@hostile(PROVED, inputs="sequences", kernels=2)
def recurrence(layer, x):
    """Every entry that is kept of its steps is read."""
    states = tf.TensorArray(tf.float32, 3, element_shape=(_batch(x), SIZE))

    def body(i, h, states):
        h = tf.tanh(tf.gather(x, i, axis=1) @ layer.kernel + h @ layer.second)
        return h, states.write(i, h)

    _, states = _steps(body, tf.zeros((_batch(x), SIZE)), states)
    return tf.reduce_sum(states.stack() ** 2, 0)


@hostile(PROVED, inputs="sequences")
def recurrence_with_batch_in_the_middle(layer, x):
    """The steps join the batch on an axis that is not the first."""

    def body(i, h):
        return (tf.tanh(tf.einsum("tbd,de->tbe", h, layer.kernel)),)

    return tf.reduce_sum(_steps(body, tf.transpose(x, [1, 0, 2]))[0], 0)


@hostile(PROVED)
def recurrence_of_two_uses(layer, x):
    return _steps(
        lambda i, h: (tf.tanh(h @ layer.kernel + layer.kernel[0] * h),), x
    )[0]


@hostile(PROVED)
def kernel_carried_by_loop(layer, x):
    h, kernel = _steps(lambda i, h, w: (tf.tanh(h @ w), w), x, layer.kernel)
    return h @ kernel


@hostile(EITHER)
def kernel_changed_by_loop(layer, x):
    return _steps(lambda i, h, w: (tf.tanh(h @ w), 0.5 * w), x, layer.kernel)[0]


@hostile(EITHER)
def kernel_kept_in_list_by_loop(layer, x):
    kernels = tf.TensorArray(tf.float32, 3, element_shape=(SIZE, SIZE))
    (kernels,) = _steps(
        lambda i, kernels: (
            kernels.write(i, tf.cast(i, tf.float32) * layer.kernel),
        ),
        kernels,
    )
    return x @ tf.reduce_sum(kernels.stack(), 0)


@hostile(EITHER)
def loop_in_loop(layer, x):
    def body(i, h):
        return _steps(lambda j, h: (tf.tanh(h @ layer.kernel),), h, count=2)

    return _steps(body, x)[0]


@hostile(EITHER)
def loop_that_takes_no_step(layer, x):
    return x + _steps(lambda i, h: (h @ layer.kernel,), x, count=0)[0]


@hostile(REFUSED)
def loop_with_custom_gradient_on_kernel(layer, x):
    @tf.custom_gradient
    def doubled(w):
        return tf.identity(w), lambda d: 2.0 * d

    return _steps(lambda i, h: (tf.tanh(h @ doubled(layer.kernel)),), x)[0]


@hostile(EITHER)
def inner_vectorized_map(layer, x):
    return tf.vectorized_map(lambda z: tf.linalg.matvec(layer.kernel, z), x)


@hostile(EITHER)
def inner_map_fn(layer, x):
    return tf.map_fn(lambda z: tf.linalg.matvec(layer.kernel, z), x)


# The examples' side: nothing is mixed, though it may look so.


@hostile(PROVED, inputs="sequences")
def merged_axes(layer, x):
    h = tf.tanh(tf.reshape(x, [-1, SIZE]) @ layer.kernel)
    return tf.reduce_mean(tf.reshape(h, [-1, SIZE, SIZE]), 1)


@hostile(PROVED, inputs="sequences")
def time_major(layer, x):
    h = tf.tanh(tf.transpose(x, [1, 0, 2]) @ layer.kernel)
    return tf.reduce_mean(h, 0)


@hostile(PROVED, inputs="sequences")
def time_major_merged(layer, x):
    h = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, SIZE])
    h = tf.tanh(h @ layer.kernel)  # [time * batch, 6]
    return tf.reduce_mean(tf.reshape(h, [SIZE, -1, SIZE]), 0)


@hostile(PROVED)
def batch_last(layer, x):
    return tf.transpose(layer.kernel @ tf.transpose(x))


@hostile(PROVED)
def silu(layer, x):
    return tf.nn.silu(x @ layer.kernel)


@hostile(PROVED)
def clipped_gradient_of_activation(layer, x):
    @tf.custom_gradient
    def clip(z):
        return tf.identity(z), lambda d: tf.clip_by_value(d, -0.01, 0.01)

    return clip(x @ layer.kernel)


@hostile(PROVED)
def reversed_gradient_of_activation(layer, x):
    @tf.custom_gradient
    def reverse(z):
        return tf.identity(z), lambda d: -0.5 * d

    return reverse(x @ layer.kernel)


@hostile(PROVED, positional=True)
def dropout(layer, x):
    return keras.random.dropout(x @ layer.kernel, 0.5, seed=layer.seed)


@hostile(PROVED, positional=True)
def noise_of_two_keys(layer, x):
    """Keras adds twelve to the key of a draw, for that of another."""
    h = x @ layer.kernel
    return h * keras.random.beta(h.shape, 2.0, 3.0, seed=layer.seed)


@hostile(PROVED)
def dropout_shared_by_batch(layer, x):
    h = x @ layer.kernel
    return keras.random.dropout(h, 0.5, noise_shape=(1, SIZE), seed=layer.seed)


@hostile(EITHER, positional=True)
def dropout_by_generator(layer, x):
    kept = layer.generator.uniform(x.shape) < 0.5
    return tf.where(kept, x @ layer.kernel, 0.0)


@hostile(EITHER, positional=True)
def scaled_by_place(layer, x):
    place = tf.range(1.0, _batch(x) + 1.0)
    return (x @ layer.kernel) * place[:, None]


@hostile(EITHER)
def features_reversed(layer, x):
    return (x @ layer.kernel)[:, ::-1]


@hostile(EITHER)
def features_with_step(layer, x):
    h = x @ layer.kernel
    return tf.concat([h[:, ::2], tf.roll(h, 1, 1)[:, 1::2]], 1)


@hostile(EITHER)
def features_sorted(layer, x):
    return tf.sort(x @ layer.kernel, axis=1)


@hostile(EITHER)
def features_gathered_for_each(layer, x):
    order = tf.argsort(tf.stop_gradient(x), -1)
    return tf.gather(x @ layer.kernel, order, batch_dims=1)


@hostile(EITHER)
def selected_for_each_entry(layer, x):
    return tf.where(x > 0.0, x @ layer.kernel, x)


@hostile(PROVED)
def selected_without_broadcasting(layer, x):
    return tf.compat.v1.where(x > 0.0, x @ layer.kernel, x)


@hostile(PROVED)
def selected_by_a_vector_of_the_batch(layer, x):
    return tf.compat.v1.where(x[:, 0] > 0.0, x @ layer.kernel, x)


@hostile(PROVED, inputs="sequences")
def convolution_in_a_function(layer, x):
    """Inside of the function, its tensors have one more axis."""
    convolve = tf.function(lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"))
    kernel = -tf.reshape(tf.transpose(layer.kernel), [1, SIZE, SIZE])
    return tf.reduce_max(convolve(x, kernel), 1)


def _transforms(rows):
    """Moves each image of a batch by numbers of its own."""
    moved = tf.one_hot([0, 4], 8)
    return tf.reduce_sum(moved, 0) + rows[:, :1] * tf.one_hot(2, 8)


def _moved(images, transforms):
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=transforms,
        output_shape=images.shape[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="REFLECT",
    )


@hostile(PROVED, inputs="images")
def images_moved_alike(layer, x):
    one = _transforms(tf.stop_gradient(layer.kernel)[:1])
    return tf.reduce_max(_moved(x @ layer.kernel, one), [1, 2])


@hostile(PROVED, inputs="images")
def images_moved_by_themselves(layer, x):
    transforms = _transforms(x[:, 0, 0])
    return tf.reduce_max(_moved(x, transforms) @ layer.kernel, [1, 2])


@hostile(PROVED, inputs="images")
def contrast_of_each_image(layer, x):
    h = tf.image.adjust_contrast(x, 2.0) @ layer.kernel
    return tf.reduce_max(h, [1, 2])


@hostile(PROVED, inputs="images")
def slice_that_begins_anywhere(layer, x):
    """The slice begins at a value that is known when the layer runs."""
    begin = tf.cast(layer.state[0], tf.int32)
    h = (x @ layer.kernel)[:, begin : begin + 3]
    return tf.reduce_max(tf.image.resize(h, [2, 2]), [1, 2])


@hostile(PROVED)
def spectrum_of_features(layer, x):
    spectrum = tf.signal.rfft(x @ layer.kernel)
    return x + tf.reduce_sum(tf.abs(spectrum), 1, keepdims=True)


@hostile(PROVED, inputs="ids")
def ids_counted_for_each(layer, x):
    """The size is computed from all ids, but is the same for all."""
    counts = tf.math.bincount(x, minlength=SIZE, maxlength=SIZE, axis=-1)
    counts.set_shape(x.shape)
    return tf.cast(counts, tf.float32) @ layer.kernel


@hostile(PROVED, inputs="ids")
def ids_looked_up(layer, x):
    table = layer.lookup_table(np.arange(SIZE), np.arange(SIZE)[::-1])
    values = tf.one_hot(table.lookup(x), SIZE)
    return tf.reduce_max(values @ layer.kernel, 1)


@hostile(PROVED)
def features_added_by_segment(layer, x):
    h = tf.transpose(x @ layer.kernel)
    ids = [0, 1, 0, 2, 1, 0]
    return tf.transpose(tf.math.unsorted_segment_sum(tf.tanh(h), ids, SIZE))


@hostile(PROVED)
def features_gathered_anew(layer, x):
    """The gradient adds up the features of one number."""
    return x + tf.gather(x @ layer.kernel, [0, 0, 1, 5, 1, 2], axis=1)


@hostile(PROVED)
def features_gathered_by_coordinates(layer, x):
    h = tf.transpose(x @ layer.kernel)
    return tf.transpose(tf.gather_nd(h, [[k] for k in [0, 0, 3, 2, 5, 5]]))


@hostile(EITHER)
def diagonal_of_gram(layer, x):
    h = x @ layer.kernel
    return h * tf.linalg.diag_part(h @ tf.transpose(h))[:, None]


@hostile(EITHER, positional=True)
def diagonal_of_features(layer, x):
    """The feature taken is that of the example's place in the batch."""
    square = tf.pad(x, [[0, SIZE - _batch(x)], [0, 0]])
    diagonal = tf.einsum("bb->b", square)[: _batch(x)]
    return diagonal[:, None] * (x @ layer.kernel)


@hostile(EITHER)
def assertion_on_batch(layer, x):
    tf.debugging.assert_less(tf.reduce_max(x), 1e9)
    return x @ layer.kernel


@hostile(EITHER)
def batch_split_and_joined(layer, x):
    h = tf.reshape(x @ layer.kernel, [-1, 2, SIZE // 2])
    return tf.reshape(tf.tanh(h), [-1, SIZE])


@hostile(EITHER)
def tiled_and_cut_back(layer, x):
    return tf.tile(x @ layer.kernel, [2, 1])[: _batch(x)]


@hostile(EITHER)
def padded_and_cut_back(layer, x):
    return tf.pad(x @ layer.kernel, [[2, 3], [0, 0]])[2 : 2 + _batch(x)]


@hostile(EITHER)
def reversed_twice(layer, x):
    return tf.reverse(tf.tanh(tf.reverse(x, [0]) @ layer.kernel), [0])


@hostile(EITHER)
def unstacked_and_stacked(layer, x):
    return tf.stack(tf.unstack(x @ layer.kernel))


@hostile(EITHER)
def experts_without_capacity(layer, x):
    chosen = tf.one_hot(tf.argmax(x, -1), SIZE)
    return chosen * (x @ layer.kernel)


@hostile(EITHER)
def gradient_inside_forward(layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        energy = tf.reduce_sum(tf.tanh(x @ layer.kernel) ** 2)
    return x - tape.gradient(energy, x)


@hostile(EITHER, inputs="sequences")
def segments_of_merged_axes(layer, x):
    h = tf.reshape(x, [-1, SIZE]) @ layer.kernel
    ids = tf.repeat(tf.range(_batch(x)), SIZE)
    return tf.math.unsorted_segment_sum(h, ids, _batch(x))


@hostile(REFUSED)
def numpy_function(layer, x):
    h = tf.numpy_function(np.tanh, [x], tf.float32)
    return x @ layer.kernel + tf.ensure_shape(h, x.shape)


@hostile(REFUSED)
def python_function(layer, x):
    h = tf.py_function(tf.matmul, [x, layer.kernel], tf.float32)
    return tf.ensure_shape(h, x.shape)


@hostile(REFUSED)
def dynamic_shape(layer, x):
    h = x @ layer.kernel
    chosen = tf.where(h[:, 0] > 0.0)
    kept = tf.gather_nd(h, chosen)
    return tf.ensure_shape(tf.scatter_nd(chosen, kept, h.shape), h.shape)


@hostile(REFUSED)
def nothing_reshaped(layer, x):
    """Without elements, no shape tells where the batch is."""
    h = tf.reshape((x @ layer.kernel)[:, None, :0], [SIZE, 0, 2])
    return (
        x @ layer.kernel
        + tf.reduce_sum(h, 2, keepdims=True)[:, :0, 0] @ (layer.kernel[:0])
    )


# Forward passes that mix the examples.


@hostile(MIXES)
def batch_mean(layer, x):
    h = x @ layer.kernel
    return h - tf.reduce_mean(h, 0)


@hostile(MIXES)
def faint_batch_mean(layer, x):
    h = x @ layer.kernel
    return h + 1e-7 * tf.reduce_mean(h, 0)


@hostile(MIXES)
def detached_batch_mean(layer, x):
    h = x @ layer.kernel
    return h - tf.stop_gradient(tf.reduce_mean(h, 0))


@hostile(MIXES)
def mean_by_matrix_product(layer, x):
    ones = tf.ones([_batch(x), _batch(x)]) / _batch(x)
    return x @ layer.kernel - ones @ x


@hostile(MIXES)
def mean_through_python(layer, x):
    notes = {}

    def note(z):
        notes["mean"] = tf.reduce_mean(z, 0)
        return z @ layer.kernel

    return note(x) - notes["mean"]


@hostile(MIXES)
def batch_moments(layer, x):
    mean, variance = tf.nn.moments(x, [0])
    h = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
    return h @ layer.kernel


@hostile(MIXES)
def fused_batch_normalization(layer, x):
    h = tf.compat.v1.nn.fused_batch_norm(
        (x @ layer.kernel)[:, None, None], tf.ones(SIZE), tf.zeros(SIZE)
    )[0]
    return h[:, 0, 0]


@hostile(RAISES)
def batch_normalization(layer, x):
    return layer.normalization(x @ layer.kernel, training=True)


@hostile(MIXES)
def kernel_scaled_by_batch(layer, x):
    return x @ (layer.kernel * tf.reduce_mean(x))


@hostile(MIXES)
def scaled_by_batch_norm(layer, x):
    return tf.clip_by_norm(x @ layer.kernel, 1.0)


@hostile(MIXES)
def scaled_by_batch_maximum(layer, x):
    h = x @ layer.kernel
    return h / tf.reduce_max(tf.abs(h))


@hostile(MIXES)
def quantized_to_batch_range(layer, x):
    h = x @ layer.kernel
    return tf.quantization.fake_quant_with_min_max_vars(
        h, tf.reduce_min(h), tf.reduce_max(h), num_bits=4
    )


@hostile(MIXES)
def batch_softmax(layer, x):
    return tf.nn.softmax(x @ layer.kernel, 0)


@hostile(MIXES, inputs="sequences")
def softmax_of_merged_axes(layer, x):
    h = tf.reshape(x @ layer.kernel, [-1, SIZE])
    h = tf.nn.softmax(h, 0)
    return tf.reduce_sum(tf.reshape(h, [-1, SIZE, SIZE]), 1)


@hostile(MIXES)
def mean_without_keepdims(layer, x):
    """Each feature loses the mean of the example of the same number."""
    h = x @ layer.kernel
    return h - tf.reduce_mean(h, 1)


@hostile(MIXES)
def mask_without_keepdims(layer, x):
    h = x @ layer.kernel
    return tf.where(x[:, 0] > 0.0, h, 0.0)


@hostile(MIXES)
def vector_of_the_batch_selects_features(layer, x):
    """Without broadcasting, a vector chooses along the first axis."""
    h = tf.transpose(x @ layer.kernel)
    chosen = tf.compat.v1.where(x[:, 0] > 0.0, h, 0.0 * h)
    return tf.transpose(chosen)


@hostile(MIXES)
def batch_taken_for_bias(layer, x):
    return tf.nn.bias_add(x @ layer.kernel, x[:, 0])


@hostile(MIXES)
def kernel_scaled_by_examples(layer, x):
    return x @ (layer.kernel * x[:, :1])


@hostile(MIXES)
def batch_unit_norm(layer, x):
    return tf.math.l2_normalize(x @ layer.kernel, 0)


@hostile(MIXES)
def batch_sort(layer, x):
    return tf.sort(x @ layer.kernel, axis=0)


@hostile(MIXES)
def batch_roll(layer, x):
    return tf.roll(x @ layer.kernel, 1, 0)


@hostile(MIXES)
def batch_reverse(layer, x):
    return tf.reverse(x @ layer.kernel, [0])


@hostile(MIXES)
def batch_reverse_by_slice(layer, x):
    return (x @ layer.kernel)[::-1]


@hostile(MIXES)
def batch_slices_with_step(layer, x):
    h = x @ layer.kernel
    return tf.concat([h[::2], h[1::2]], 0)


@hostile(MIXES)
def batch_shift(layer, x):
    h = x @ layer.kernel
    return tf.concat([h[1:], h[:1]], 0)


@hostile(MIXES)
def first_example_added(layer, x):
    return (x + x[:1]) @ layer.kernel


@hostile(MIXES)
def last_example_broadcast(layer, x):
    h = x @ layer.kernel
    return h + tf.broadcast_to(h[-1], h.shape)


@hostile(MIXES)
def batch_restacked(layer, x):
    h = tf.unstack(x @ layer.kernel)
    return tf.stack(h[1:] + h[:1])


@hostile(MIXES)
def batch_cumulative_sum(layer, x):
    return tf.cumsum(x @ layer.kernel, 0)


@hostile(MIXES)
def batch_cumulative_product(layer, x):
    return tf.math.cumprod(x @ layer.kernel, 0)


@hostile(MIXES)
def batch_shuffle(layer, x):
    h = x @ layer.kernel
    return tf.gather(h, tf.random.shuffle(tf.range(_batch(x))))


@hostile(MIXES)
def mixup(layer, x):
    return (0.7 * x + 0.3 * tf.roll(x, 1, 0)) @ layer.kernel


@hostile(MIXES)
def gather_by_own_features(layer, x):
    h = x @ layer.kernel
    return tf.gather(h, tf.argmax(x, -1) % _batch(x))


@hostile(MIXES)
def gather_by_constant(layer, x):
    return tf.gather(x @ layer.kernel, [_batch(x) - 1] * _batch(x))


@hostile(MIXES)
def gather_nd_over_batch(layer, x):
    place = tf.range(_batch(x))[::-1]
    return tf.gather_nd(x @ layer.kernel, place[:, None])


@hostile(MIXES)
def scatter_over_batch(layer, x):
    h = x @ layer.kernel
    place = tf.range(_batch(x))[::-1, None]
    return tf.tensor_scatter_nd_add(h, place, h)


@hostile(MIXES)
def pair_attention(layer, x):
    return tf.nn.softmax(x @ tf.transpose(x)) @ (x @ layer.kernel)


@hostile(MIXES, kernels=3, inputs="sequences")
def attention_over_merged_axes(layer, x):
    tokens = tf.reshape(x, [1, -1, SIZE])
    q, k, v = (tokens @ w.value for w in layer.kernels)
    h = tf.nn.softmax(tf.matmul(q, k, transpose_b=True)) @ v
    return tf.reduce_mean(tf.reshape(h, x.shape), 1)


@hostile(MIXES)
def gram_product(layer, x):
    return x @ tf.transpose(x) @ x @ layer.kernel


@hostile(MIXES)
def covariance_product(layer, x):
    return x @ tf.matmul(x, x, transpose_a=True) @ layer.kernel


@hostile(MIXES)
def gram_by_einsum(layer, x):
    return tf.einsum("bi,ci->bc", x, x) @ layer.kernel


@hostile(MIXES)
def einsum_over_batch(layer, x):
    return tf.einsum("bi,ci->bc", x, x @ layer.kernel)[:, :1] + x


@hostile(MIXES)
def einsum_sums_batch(layer, x):
    return x + tf.einsum("bi,ij->j", x, layer.kernel)


@hostile(MIXES, inputs="sequences")
def einsum_swaps_time_and_batch(layer, x):
    return tf.einsum("tbi,ij->bj", x, layer.kernel)


@hostile(MIXES, inputs="sequences")
def batch_taken_for_matrix(layer, x):
    return tf.reduce_mean((x @ layer.kernel) @ x[:, 0], 1)


@hostile(MIXES)
def batch_taken_for_filter(layer, x):
    signal = (x @ layer.kernel)[:, :, None]
    return tf.nn.conv1d(signal, x[:, :1, None], 1, "SAME")[:, :, 0]


@hostile(MIXES)
def pairwise_distances(layer, x):
    h = x @ layer.kernel
    gaps = tf.abs(h[:, None] - h[None])  # [batch, batch, 6]
    return h + tf.reduce_mean(gaps, 1)


@hostile(MIXES)
def features_taken_for_batch(layer, x):
    return tf.transpose(x) @ layer.kernel


@hostile(MIXES, inputs="sequences")
def batch_summed_by_kernel(layer, x):
    h = tf.transpose(x, [1, 2, 0]) @ layer.kernel  # [time, 6, 6]
    return tf.reduce_mean(h, 0)


@hostile(MIXES, inputs="sequences")
def batch_taken_for_time(layer, x):
    h = tf.tanh(x @ layer.kernel)
    return tf.reduce_mean(tf.reshape(h, [SIZE, -1, SIZE]), 0)


@hostile(MIXES, inputs="sequences")
def example_taken_for_batch(layer, x):
    return x[0] @ layer.kernel


@hostile(MIXES, inputs="ids")
def one_hot_on_leading_axis(layer, x):
    return tf.one_hot(x[:, 0], SIZE, axis=0) @ layer.kernel


@hostile(MIXES)
def stacked_on_leading_axis(layer, x):
    h = tf.stack([x * k for k in range(SIZE)])  # [6, batch, 6]
    return tf.reduce_mean(tf.tanh(h @ layer.kernel), 1)


@hostile(MIXES, inputs="sequences")
def reshape_for_transpose(layer, x):
    h = tf.reshape(x[:, :3], [3, -1, SIZE])  # a transpose was meant
    return tf.reduce_mean(tf.tanh(h @ layer.kernel), 0)


@hostile(MIXES)
def ghost_batches(layer, x):
    h = tf.reshape(x @ layer.kernel, [2, _batch(x) // 2, SIZE])
    h -= tf.reduce_mean(h, 1, keepdims=True)
    return tf.reshape(h, x.shape)


@hostile(MIXES)
def batch_split_and_transposed(layer, x):
    h = tf.reshape(x @ layer.kernel, [2, _batch(x) // 2, SIZE])
    return tf.reshape(tf.transpose(h, [1, 0, 2]), x.shape)


@hostile(MIXES)
def concatenated_with_transpose(layer, x):
    h = tf.concat([x @ layer.kernel, tf.transpose(x)], 1)
    return h[:, ::2]


@hostile(MIXES)
def stacked_with_transpose(layer, x):
    return tf.reduce_max(tf.stack([x @ layer.kernel, tf.transpose(x)]), 0)


@hostile(MIXES)
def batch_split_onto_features(layer, x):
    h = tf.concat(tf.split(x @ layer.kernel, 2), 1)
    return tf.reshape(h, x.shape)


@hostile(MIXES)
def batch_tiled_and_folded(layer, x):
    h = tf.tile(x @ layer.kernel, [2, 1])
    return tf.reduce_mean(tf.reshape(h, [_batch(x), 2, SIZE]), 1)


@hostile(MIXES)
def batch_repeated_and_cut(layer, x):
    return tf.repeat(x @ layer.kernel, 2, axis=0)[: _batch(x)]


@hostile(MIXES)
def padding_shifts_batch(layer, x):
    return tf.pad(x @ layer.kernel, [[1, 0], [0, 0]])[: _batch(x)]


@hostile(MIXES)
def mirror_padding_of_batch(layer, x):
    h = tf.pad(x @ layer.kernel, [[2, 0], [0, 0]], "SYMMETRIC")
    return h[: _batch(x)]


@hostile(MIXES)
def convolution_over_batch(layer, x):
    kernel = tf.stack([layer.kernel] * 3)
    return tf.nn.conv1d(x[None], kernel, 1, "SAME")[0]


@hostile(MIXES, inputs="sequences")
def convolution_after_transpose(layer, x):
    kernel = tf.stack([layer.kernel] * 3)
    h = tf.nn.conv1d(tf.transpose(x, [1, 0, 2]), kernel, 1, "SAME")
    return tf.reduce_mean(h, 0)


@hostile(MIXES)
def pooling_over_batch(layer, x):
    h = (x @ layer.kernel)[None]
    return tf.nn.max_pool1d(h, 3, 1, "SAME")[0]


@hostile(MIXES, inputs="images")
def batch_to_space(layer, x):
    h = tf.batch_to_space(x, [2, 3], tf.zeros([2, 2], tf.int32))
    h = tf.nn.avg_pool2d(h, 3, 1, "SAME")
    h = tf.space_to_batch(h, [2, 3], tf.zeros([2, 2], tf.int32))
    return tf.reduce_mean(h, [1, 2]) @ layer.kernel


@hostile(MIXES)
def fourier_transform_of_batch(layer, x):
    h = tf.signal.fft(tf.cast(tf.transpose(x), tf.complex64))
    return tf.transpose(tf.math.real(h)) @ layer.kernel


@hostile(MIXES)
def whitening(layer, x):
    covariance = tf.matmul(x, x, transpose_a=True) + tf.eye(SIZE)
    return tf.transpose(
        tf.linalg.solve(covariance, tf.transpose(x @ layer.kernel))
    )


@hostile(MIXES, kernels=2)
def experts_of_limited_capacity(layer, x):
    gates = tf.nn.softmax(x @ layer.kernel)
    chosen = tf.one_hot(tf.argmax(gates, -1), SIZE)
    places = tf.cumsum(chosen, 0) * chosen
    kept = gates * chosen * tf.cast(places <= 1.0, tf.float32)
    return x + tf.reduce_sum(kept, -1, keepdims=True) * (x @ layer.second)


@hostile(MIXES)
def best_examples_only(layer, x):
    h = x @ layer.kernel
    threshold = tf.math.top_k(h[:, 0], min(2, _batch(x))).values[-1]
    return h * tf.cast(h[:, :1] >= threshold, tf.float32)


@hostile(MIXES)
def experts_choose_examples(layer, x):
    h = x @ layer.kernel
    best = tf.argmax(h, 0, output_type=tf.int32)  # [6]: an example each
    mine = best[None] == tf.range(_batch(x))[:, None]
    return x + h * tf.cast(mine, tf.float32)


@hostile(MIXES)
def branch_on_batch(layer, x):
    return tf.cond(
        tf.reduce_sum(x**2) > 15.0,
        lambda: x @ layer.kernel,
        lambda: x,
    )


@hostile(MIXES)
def selected_by_batch(layer, x):
    return tf.where(tf.reduce_sum(x**2) > 15.0, x @ layer.kernel, x)


@hostile(MIXES)
def loop_as_long_as_batch_says(layer, x):
    return tf.while_loop(
        lambda z: tf.reduce_sum(z**2) > 5.0,
        lambda z: (tf.tanh(0.5 * z @ layer.kernel),),
        (x,),
        maximum_iterations=5,
    )[0]


@hostile(MIXES)
def loop_as_long_as_one_example_says(layer, x):
    return tf.while_loop(
        lambda z: z[0, 0] < 3.0,
        lambda z: (tf.abs(z @ layer.kernel) + 1.0,),
        (x,),
        maximum_iterations=5,
    )[0]


@hostile(MIXES)
def loop_carries_batch_sum(layer, x):
    def body(i, h, total):
        h = tf.tanh(h @ layer.kernel + total)
        return h, tf.reduce_sum(h, 0)

    return _steps(body, x, tf.zeros(SIZE))[0]


@hostile(MIXES)
def loop_starts_from_batch_mean(layer, x):
    def body(i, h):
        return (tf.tanh(h @ layer.kernel + x),)

    mean = tf.reduce_mean(x, 0, keepdims=True)
    return _steps(body, tf.repeat(mean, _batch(x), 0))[0]


def _places(x):
    return tf.ones_like(x) * tf.range(float(_batch(x)))[:, None]


@hostile(MIXES)
def loop_starts_from_places(layer, x):
    return _steps(
        lambda i, h: (tf.tanh(h @ layer.kernel + x),),
        _places(tf.zeros(x.shape)),
    )[0]


@hostile(MIXES)
def loop_counts_places(layer, x):
    """The carried value is public, and alike at all places at first."""

    def body(i, h, count):
        return tf.tanh(h @ layer.kernel + count), count + places

    places = _places(tf.zeros(x.shape))
    return _steps(body, x, tf.zeros(x.shape))[0]


@hostile(MIXES)
def loop_reads_places_from_list(layer, x):
    places = tf.TensorArray(tf.float32, 3, clear_after_read=False).unstack(
        tf.stack([_places(tf.zeros(x.shape))] * 3)
    )
    return _steps(
        lambda i, h: (tf.tanh(h @ layer.kernel + places.read(i)),), x
    )[0]


@hostile(MIXES)
def entries_kept_by_place(layer, x):
    """The entries that a triangle keeps of a row follow from its place."""
    return tf.linalg.band_part(x @ layer.kernel, 0, -1)


@hostile(MIXES)
def bias_of_places(layer, x):
    h = tf.transpose(x @ layer.kernel)
    return tf.transpose(tf.nn.bias_add(h, tf.range(float(_batch(x)))))


@hostile(MIXES)
def bias_of_places_on_the_second_axis(layer, x):
    h = tf.transpose(x @ layer.kernel)[:, :, None, None]
    places = tf.range(float(_batch(x)))
    h = tf.nn.bias_add(h, places, data_format="NCHW")
    return tf.transpose(h[:, :, 0, 0])


@hostile(PROVED)
def bias_that_is_the_same_at_all_places(layer, x):
    h = tf.transpose(x @ layer.kernel)
    return tf.transpose(tf.nn.bias_add(h, tf.ones(_batch(x))))


def _missing(layer, x, default):
    """Values that an empty table gives for keys of the examples."""
    values = layer.table.lookup(tf.cast(x[:, :1], tf.int64), default)
    values.set_shape([_batch(x), 1])
    return values


@hostile(MIXES)
def default_of_table_by_place(layer, x):
    places = tf.range(float(_batch(x)))[:, None]
    return tf.tanh(x @ layer.kernel + _missing(layer, x, places))


@hostile(PROVED)
def default_of_table(layer, x):
    return tf.tanh(x @ layer.kernel + _missing(layer, x, None))


@hostile(MIXES)
def loop_keeps_batch_sum_in_list(layer, x):
    sums = tf.TensorArray(
        tf.float32, 4, element_shape=(SIZE,), clear_after_read=False
    ).unstack(tf.zeros((4, SIZE)))

    def body(i, h, sums):
        h = tf.tanh(h @ layer.kernel + sums.read(i))
        return h, sums.write(i + 1, tf.reduce_sum(h, 0))

    return _steps(body, x, sums)[0]


@hostile(MIXES)
def loop_transposes(layer, x):
    """Examples are rows and columns in turn, step by step."""
    return _steps(lambda i, h: (tf.transpose(tf.tanh(h @ layer.kernel)),), x)[0]


@hostile(MIXES)
def loop_exchanges_lists(layer, x):
    """Elements of the same shape, of which one has the batch in columns."""
    rows, columns = (
        tf.TensorArray(tf.float32, 3, clear_after_read=False).unstack(
            tf.stack([t] * 3)
        )
        for t in (x, tf.transpose(x))
    )

    def body(i, h, rows, columns):
        return tf.tanh(h @ layer.kernel + rows.read(i)), columns, rows

    return _steps(body, x, rows, columns)[0]


@hostile(MIXES, inputs="sequences")
def loop_over_batch_as_time(layer, x):
    """The batch is passed where a layer expects time first."""

    def body(i, h):
        return (tf.tanh(x[i] @ layer.kernel + h),)

    return _steps(body, tf.zeros((SIZE, SIZE)), count=_batch(x))[0]


@hostile(MIXES)
def gradient_centred_in_loop(layer, x):
    @tf.custom_gradient
    def centre(z):
        return tf.identity(z), lambda d: d - tf.reduce_mean(d, 0)

    return _steps(lambda i, h: (tf.tanh(centre(h @ layer.kernel)),), x)[0]


@hostile(MIXES)
def scan_over_batch(layer, x):
    def step(carry, z):
        return tf.tanh(tf.linalg.matvec(layer.kernel, carry) + z)

    return tf.scan(step, x, tf.zeros(SIZE))


@hostile(MIXES)
def map_that_sees_batch(layer, x):
    return tf.map_fn(
        lambda z: tf.linalg.matvec(layer.kernel, z - tf.reduce_mean(x, 0)), x
    )


@hostile(MIXES)
def vectorized_map_that_sees_batch(layer, x):
    return tf.vectorized_map(
        lambda z: tf.linalg.matvec(layer.kernel, z - tf.reduce_mean(x, 0)), x
    )


@hostile(MIXES)
def function_that_mixes(layer, x):
    @tf.function
    def centred(z):
        return z - tf.reduce_mean(z, 0)

    return centred(x @ layer.kernel)


@hostile(MIXES)
def function_reused_on_transpose(layer, x):
    """The same function is called twice: over features, then over examples."""
    centred = tf.function(lambda z: z - tf.reduce_mean(z, 1, keepdims=True))
    return centred(x @ layer.kernel) + tf.transpose(centred(tf.transpose(x)))


@hostile(MIXES, inputs="ids")
def segments_by_ids(layer, x):
    h = tf.gather(layer.kernel, x[:, 0])
    sums = tf.math.unsorted_segment_sum(h, x[:, 0], SIZE)
    return tf.gather(sums, x[:, 0])


@hostile(MIXES)
def segments_of_examples(layer, x):
    """Two examples share a segment, whatever their values."""
    h = x @ layer.kernel
    return h + tf.math.unsorted_segment_sum(tf.tanh(h), [0, 1, 1, 3, 4, 5], 6)


@hostile(MIXES)
def spectrum_of_batch_and_features(layer, x):
    h = tf.cast(x @ layer.kernel, tf.complex64)
    return tf.abs(tf.signal.fft2d(h))


@hostile(MIXES)
def slice_of_batch_that_begins_anywhere(layer, x):
    h = x @ layer.kernel
    at = tf.cast(layer.state[0], tf.int32)
    return h + tf.ensure_shape(h[at : at + 1], [1, SIZE])


@hostile(MIXES, inputs="images")
def images_moved_by_the_next(layer, x):
    other = tf.roll(_transforms(x[:, 0, 0]), 1, 0)
    return tf.reduce_max(_moved(x, other) @ layer.kernel, [1, 2])


@hostile(MIXES, inputs="images")
def contrast_of_the_batch(layer, x):
    h = tf.transpose(x, [1, 0, 2, 3])
    h = tf.transpose(tf.image.adjust_contrast(h, 2.0), [1, 0, 2, 3])
    return tf.reduce_max(h @ layer.kernel, [1, 2])


@hostile(MIXES, inputs="ids")
def ids_counted_over_batch(layer, x):
    counts = tf.math.bincount(
        tf.transpose(x), minlength=SIZE, maxlength=SIZE, axis=-1
    )
    counts.set_shape(x.shape)
    return tf.transpose(tf.cast(counts, tf.float32)) @ layer.kernel


@hostile(MIXES, inputs="ids")
def ids_counted_up_to_the_largest(layer, x):
    """A size that is limited on one side only depends on all ids."""
    largest = tf.maximum(tf.reduce_max(x[:, 0]) + 1, 2)
    h = tf.reduce_mean(tf.one_hot(x, SIZE) @ layer.kernel, 1)
    return h * tf.cast(tf.minimum(largest, SIZE), tf.float32)


@hostile(MIXES)
def count_of_what_is_clamped(layer, x):
    """The values are zero in any case, but their number may vary."""
    positions = tf.cast(tf.where(x[:, 0] > 0.0), tf.int32)
    count = tf.size(tf.minimum(tf.maximum(positions, 0), 0))
    return (x @ layer.kernel) * tf.cast(count, tf.float32)


@hostile(MIXES)
def count_of_what_is_clamped_and_given_a_shape(layer, x):
    """A shape that was set is not checked when the graph runs."""
    positions = tf.cast(tf.where(x[:, 0] > 0.0), tf.int32)
    zeros = tf.minimum(tf.maximum(positions, 0), 0)
    if tf.inside_function():
        zeros.set_shape([SIZE, 1])
    count = tf.raw_ops.Size(input=zeros)
    return (x @ layer.kernel) * tf.cast(count, tf.float32)


@hostile(MIXES, inputs="ids")
def divided_by_frequency(layer, x):
    counts = tf.cast(tf.math.bincount(x, minlength=SIZE), tf.float32)
    weights = 1.0 / tf.gather(tf.ensure_shape(counts, [SIZE]), x)
    h = tf.gather(layer.kernel, x) * weights[..., None]
    return tf.reduce_sum(h, 1)


@hostile(MIXES, inputs="ids")
def numbered_by_first_use(layer, x):
    _, number = tf.unique(x[:, 0])
    return tf.gather(layer.kernel, tf.ensure_shape(number, [_batch(x)]))


@hostile(MIXES)
def random_seed_from_batch(layer, x):
    total = tf.bitcast(tf.reduce_sum(x), tf.int32)
    noise = tf.random.stateless_normal(x.shape, tf.stack([total, 0]))
    return (x + noise) @ layer.kernel


@hostile(MIXES)
def numpy_function_that_mixes(layer, x):
    mean = tf.numpy_function(lambda z: z.mean(0), [x], tf.float32)
    return x @ layer.kernel - tf.ensure_shape(mean, [SIZE])


@hostile(RAISES)
def state_read_back(layer, x):
    layer.hidden.assign(tf.reduce_mean(x, 0))
    return x @ layer.kernel + layer.hidden


# Backward passes that mix the examples, behind an innocent forward pass.


@hostile(MIXES)
def gradient_scaled_by_its_norm(layer, x):
    @tf.custom_gradient
    def scale(z):
        return tf.identity(z), lambda d: d / (1e-3 + tf.norm(d))

    return scale(x @ layer.kernel)


@hostile(MIXES)
def gradient_clipped_by_batch(layer, x):
    @tf.custom_gradient
    def clip(z):
        return tf.identity(z), lambda d: tf.clip_by_norm(d, 0.1)

    return clip(x @ layer.kernel)


@hostile(MIXES)
def gradient_centred(layer, x):
    @tf.custom_gradient
    def centre(z):
        return tf.identity(z), lambda d: d - tf.reduce_mean(d, 0)

    return centre(x @ layer.kernel)


@hostile(MIXES)
def gradient_rolled(layer, x):
    @tf.custom_gradient
    def roll(z):
        return tf.identity(z), lambda d: tf.roll(d, 1, 0)

    return roll(x @ layer.kernel)


@hostile(MIXES)
def gradient_weighted_by_batch(layer, x):
    @tf.custom_gradient
    def weigh(z):
        return tf.identity(z), lambda d: d * tf.reduce_mean(z)

    return weigh(x @ layer.kernel)


@hostile(MIXES)
def gradient_centred_in_function(layer, x):
    @tf.custom_gradient
    def centre(z):
        return tf.identity(z), lambda d: d - tf.reduce_mean(d, 0)

    return tf.function(centre)(x @ layer.kernel)


@hostile(MIXES)
def gradient_crosses_outputs(layer, x):
    """Each output passes the gradient of the other one, reversed."""

    @tf.custom_gradient
    def cross(a, b):
        def gradient(da, db):
            return db[::-1], da[::-1]

        return (tf.identity(a), tf.identity(b)), gradient

    return tf.add_n(cross(x @ layer.kernel, tf.tanh(x @ layer.kernel)))


# Reductions of the losses that mix the examples.


@hostile(MIXES, on_losses=True)
def losses_centred(layer, losses, x, y):
    return losses - tf.reduce_mean(losses)


@hostile(MIXES, on_losses=True)
def losses_divided_by_sum(layer, losses, x, y):
    return losses / tf.stop_gradient(tf.reduce_sum(losses))


@hostile(MIXES, on_losses=True)
def losses_all_the_mean(layer, losses, x, y):
    return tf.fill(losses.shape, tf.reduce_mean(losses))


@hostile(MIXES, on_losses=True)
def losses_reversed(layer, losses, x, y):
    return losses[::-1]


@hostile(MIXES, on_losses=True)
def losses_of_hard_examples(layer, losses, x, y):
    threshold = tf.sort(losses)[_batch(x) // 2]
    return tf.where(losses >= threshold, losses, 0.0)


@hostile(MIXES, on_losses=True)
def losses_balanced_by_class(layer, losses, x, y):
    counts = tf.reduce_sum(tf.one_hot(y, CLASSES), 0)
    return losses / tf.gather(counts, y)


@hostile(MIXES, on_losses=True)
def losses_over_batch_axis(layer, losses, x, y):
    logits = tf.transpose(x @ layer.kernel)
    return losses + model_zoo.cross_entropy(tf.zeros([SIZE], tf.int32), logits)


@hostile(MIXES, on_losses=True)
def losses_with_negatives_in_batch(layer, losses, x, y):
    h = tf.math.l2_normalize(x @ layer.kernel, 1)
    return losses + model_zoo.cross_entropy(
        tf.range(_batch(x)), tf.matmul(h, x, transpose_b=True)
    )


# States that learn of the batch: they would leave with the model.


@hostile(STATE)
def state_averages_batch(layer, x):
    layer.state.assign(0.9 * layer.state + 0.1 * tf.reduce_mean(x, 0))
    return x @ layer.kernel


@hostile(STATE)
def state_untracked(layer, x):
    layer.hidden.assign_add(tf.reduce_mean(x, 0))
    return x @ layer.kernel


@hostile(STATE)
def state_remembers_example(layer, x):
    layer.state.assign(x[0])
    return x @ layer.kernel


@hostile(STATE)
def state_entry_assigned(layer, x):
    layer.hidden[2].assign(tf.reduce_max(x))
    return x @ layer.kernel


@hostile(STATE)
def state_scattered(layer, x):
    layer.hidden.scatter_nd_update([[0]], [tf.reduce_max(x)])
    return x @ layer.kernel


@hostile(STATE, inputs="ids")
def state_counts_tokens(layer, x):
    ids = tf.reshape(x, [-1])
    ones = tf.ones_like(ids, tf.float32)
    layer.hidden.scatter_add(tf.IndexedSlices(ones, ids))
    return tf.reduce_mean(tf.gather(layer.kernel, x), 1)


@hostile(STATE)
def state_is_the_kernel(layer, x):
    h = x @ layer.kernel
    layer.kernel.assign_add(1e-3 * tf.matmul(x, x, transpose_a=True))
    return h


@hostile(STATE)
def state_of_metric(layer, x):
    layer.meter.update_state(tf.reduce_mean(x))
    return x @ layer.kernel


@hostile(STATE)
def state_moved_by_optimizer(layer, x):
    tf.raw_ops.ResourceApplyGradientDescent(
        var=layer.hidden.handle, alpha=0.1, delta=tf.reduce_mean(x, 0)
    )
    return x @ layer.kernel


@hostile(STATE)
def state_in_branch(layer, x):
    def update():
        layer.hidden.assign(tf.reduce_mean(x, 0))
        return x @ layer.kernel

    return tf.cond(tf.reduce_sum(layer.state) > 0.0, update, lambda: x)


@hostile(STATE)
def state_in_loop(layer, x):
    def body(i):
        layer.hidden.assign_add(tf.reduce_mean(x, 0))
        return (i + 1,)

    tf.while_loop(lambda i: i < 2, body, (0,))
    return x @ layer.kernel


@hostile(STATE)
def state_in_function(layer, x):
    @tf.function
    def update(z):
        layer.hidden.assign(tf.reduce_mean(z, 0))

    update(x)
    return x @ layer.kernel


@hostile(STATE)
def state_in_nested_functions(layer, x):
    @tf.function
    def inner(z):
        layer.hidden.assign(z)

    @tf.function
    def outer(z):
        inner(tf.reduce_mean(z, 0))
        return z @ layer.kernel

    return outer(x)


@hostile(STATE)
def state_counts_when_batch_says(layer, x):
    """The value assigned is public; whether it is assigned is not."""

    def count():
        layer.hidden.assign_add(tf.ones(SIZE))
        return 0

    tf.cond(tf.reduce_sum(x) > 0.0, count, lambda: 0)
    return x @ layer.kernel


@hostile(STATE)
def state_counts_as_long_as_batch_says(layer, x):
    def body(total):
        layer.hidden.assign_add(tf.ones(SIZE))
        return (total - 1.0,)

    tf.while_loop(lambda t: t > 0.0, body, (tf.reduce_sum(tf.abs(x)),))
    return x @ layer.kernel


@hostile(STATE)
def state_entry_chosen_by_batch(layer, x):
    """The value assigned is public; where it is assigned is not."""
    place = tf.argmax(tf.reduce_sum(x, 0))
    layer.hidden.scatter_nd_update(place[None, None], [2.0])
    return x @ layer.kernel


@hostile(STATE)
def state_by_chain(layer, x):
    """The second state learns of the batch through the first alone."""
    layer.state.assign(tf.reduce_mean(x, 0))
    layer.hidden.assign(layer.state + 0.0)
    return x @ layer.kernel


@hostile(STATE)
def state_in_backward_pass(layer, x):
    @tf.custom_gradient
    def spy(z):
        def gradient(d):
            layer.hidden.assign(tf.reduce_mean(d, 0))
            return d

        return tf.identity(z), gradient

    return spy(x @ layer.kernel)


@hostile(STATE, on_losses=True)
def state_averages_losses(layer, losses, x, y):
    layer.hidden.assign(tf.fill([SIZE], tf.reduce_mean(losses)))
    return losses


@hostile(RAISES)
def state_in_hash_table(layer, x):
    keys = tf.range(_batch(x), dtype=tf.int64)
    layer.table.insert(keys, tf.reduce_sum(x, 1))
    return x @ layer.kernel


@hostile(RAISES)
def state_of_generator_skipped(layer, x):
    layer.generator.skip(tf.cast(tf.reduce_max(x), tf.int64))
    return x @ layer.kernel


@hostile(RAISES)
def state_in_queue(layer, x):
    layer.queue.enqueue(tf.reduce_mean(x))
    return x @ layer.kernel
