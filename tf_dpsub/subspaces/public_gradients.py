"""Per-example gradients of public examples, a chunk of rows at a time."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import tree

from tf_dpsub.data import given_batches
from tf_dpsub.gradients.rows import scale_rows

# Rows are scaled down to this norm, so that products of two of them are finite.
_LARGEST_NORM = 1e12


class PublicGradients:
    """The matrix of per-example gradients of public data, `[m, parameters]`.

    It is worked through in chunks of rows; the matrix is never stored.

    Formal guarantees: rows depend on the weights and on public data alone.

    Args:
        model: compiled `tf_dpsub.PrivateModel`, whose step is built.
        x: structure of arrays whose axis 0 is the example.
        y: the same for targets; None for random labels.
        chunk_size: int, the most rows at a time.
        variables: list of variables that rows are with respect to. Defaults to
            `None`, those that the optimizer of the model clips rows of.

    Attributes:
        examples: int, the number of rows m.

    Raises:
        ValueError: if the data do not fit the model.
    """

    def __init__(
        self, model, x, y, chunk_size: int, variables: list | None = None
    ):
        self._step = model.training_step
        self._variables = variables
        self.examples = len(tree.flatten(x)[0])
        self._chunk_size = chunk_size
        spec = self._step.spec
        self._draw_labels = None
        if y is None and "y" in spec:
            self._draw_labels = _random_labels(model, spec["y"])
        data = given_batches.named(
            *model.with_features(model.preprocessed((x, y)))
        )
        data.pop("w", None)
        data = tree.map_structure(tf.convert_to_tensor, data)
        _check_fit(data, spec, self._draw_labels is None)
        self._data = _cast_like(data, spec)

    def draw(self, key, indices=None):
        """The examples of one refresh, with labels drawn by `key` if random.

        Args:
            key: int64 tensor of shape `[2]`.
            indices: int tensor of static shape, which examples. Defaults to
                `None`, all.

        Returns:
            Structure of tensors `[chunks, rows of a chunk, ...]`, for `fold`.
            Where `real` is 0, a row only pads its chunk.
        """
        batch = dict(self._data)
        if self._draw_labels is not None:
            batch["y"] = self._draw_labels(self.examples, key)
        if indices is not None:
            batch = tree.map_structure(lambda t: tf.gather(t, indices), batch)
        count = tree.flatten(batch["x"])[0].shape[0]
        chunks = -(-count // self._chunk_size)
        # A batch of one has no axis to follow.
        size = max(2, -(-count // chunks))
        padding = chunks * size - count
        batch["real"] = tf.ones([count])

        def chunked(tensor):
            # What pads has to be a valid input, though it is ignored.
            tensor = tf.concat([tensor, tf.repeat(tensor[:1], padding, 0)], 0)
            return tf.reshape(tensor, [chunks, size, *tensor.shape[1:]])

        batch = tree.map_structure(chunked, batch)
        is_real = tf.reshape(tf.range(chunks * size) < count, [chunks, size])
        batch["real"] *= tf.cast(is_real, tf.float32)
        return batch

    def fold(self, batch, function: Callable, state):
        """Combines all chunks, one after another.

        Args:
            batch: what `draw` returned.
            function: callable of the position of a chunk (int32 tensor), its
                `Rows` (zero where they pad it) and a state, which returns the
                next state.
            state: structure of tensors.

        Returns:
            The last state.
        """
        return self.fold_gradients(
            batch, lambda i, g, state: function(i, Rows(g), state), state
        )

    def fold_gradients(self, batch, function: Callable, state):
        """As `fold`, of rows that are neither stored nor scaled.

        Args: as `fold`, with a `gradients.PerExampleGradients` in place of the
            `Rows`.
        """
        chunks = batch["real"].shape[0]
        if chunks == 1:
            return function(tf.constant(0), self.chunk(batch, 0), state)

        def body(i, state):
            return i + 1, function(i, self.chunk(batch, i), state)

        _, state = tf.while_loop(
            lambda i, _: i < chunks,
            body,
            (tf.constant(0), state),
            # Else up to ten chunks are in memory at a time.
            parallel_iterations=1,
        )
        return state

    def rows(self, batch, i):
        """The rows of chunk `i`, as `fold` gives them."""
        return Rows(self.chunk(batch, i))

    def chunk(self, batch, i):
        """Gradients of chunk `i`, as `fold_gradients` gives them."""
        part = tree.map_structure(lambda t: t[i], batch)
        gradients, _ = self._step.per_example_gradients(part, self._variables)
        return gradients


class Rows:
    """Rows of a chunk, scaled so that products of two of them are finite.

    Args:
        gradients: `tf_dpsub.gradients.PerExampleGradients`.
    """

    def __init__(self, gradients):
        self._gradients = gradients
        self._factors = finite_factors(gradients)
        blocks = [
            tf.reshape(gradients.rows(v), [gradients.batch_size, -1])
            for v in gradients.variables
        ]
        self._blocks = tf.cond(
            tf.reduce_min(self._factors) < 1,
            lambda: [scale_rows(self._factors, b) for b in blocks],
            lambda: blocks,
        )

    def of(self, group):
        """Blocks `[rows, size]`, one for each variable of a group."""
        return [self._blocks[k] for k in group.indices]

    def combinations(self, group, weights):
        """Blocks `[size, k]` of `rows^T @ weights`, of weights `[rows, k]`."""
        return self._gradients.combinations(
            self._factors[:, None] * weights,
            [self._gradients.variables[k] for k in group.indices],
        )

    def gram(self, group):
        """Inner products of the rows in one group, `[rows, rows]`."""
        products = self._gradients.gram(
            [self._gradients.variables[k] for k in group.indices]
        )
        return self._factors[:, None] * products * self._factors


def finite_factors(gradients):
    """Factors `[rows]` of at most 1, with which products of rows are finite.

    Args:
        gradients: `tf_dpsub.gradients.PerExampleGradients`.
    """
    norms = tf.sqrt(gradients.sq_norms())
    return _LARGEST_NORM / tf.maximum(norms, _LARGEST_NORM)


def _random_labels(model, spec):
    """A function of the number of labels and a key, for one kind of loss."""
    output = model.output_shape
    loss = model.loss
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    loss = getattr(loss, "__name__", type(loss).__name__)
    if (
        any(kind in loss.lower() for kind in ("crossentropy", "hinge"))
        and isinstance(spec, tf.TensorSpec)
        and isinstance(output, tuple)
    ):
        shape = tuple(spec.shape[1:])
        if shape in ((), (1,)) and len(output) == 2:
            # One output stands for two classes.
            return lambda count, key: tf.cast(
                _classes([count, *shape], key, max(2, output[1])), spec.dtype
            )
        if shape == output[1:] and len(shape) == 1:
            return lambda count, key: tf.one_hot(
                _classes([count], key, shape[0]), shape[0], dtype=spec.dtype
            )
    raise ValueError(
        "Expected a classifier with one label for each example to draw random "
        f"labels for, got targets {spec}, outputs of shape {output} and the "
        f"loss {loss}. Pass `y_public`."
    )


def _classes(shape, key, count):
    return tf.random.stateless_uniform(shape, key, 0, count, tf.int32)


def _check_fit(data, spec, has_labels):
    names = ("x", "y") if has_labels else ("x",)
    for name in names:
        shapes = tree.map_structure(
            lambda t: tuple(t.shape[1:]), data.get(name)
        )
        wanted = tree.map_structure(
            lambda s: tuple(s.shape[1:]), spec.get(name)
        )
        if shapes != wanted:
            raise ValueError(
                f"Expected public {name} of the shapes of the private ones, "
                f"{wanted} for each example, got {shapes}."
            )


def _cast_like(data, spec):
    return {
        name: tree.map_structure(
            lambda t, s: t if t.dtype == s.dtype else tf.cast(t, s.dtype),
            part,
            spec[name],
        )
        for name, part in data.items()
    }
