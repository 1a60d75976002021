"""A function of one row, applied anew to each row that was drawn."""

import inspect
import itertools

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub.gradients import vectorized
from tf_dpsub.gradients.graph import effects, functions

# For the statement.
_PYTHON = "what Python functions of `map` keep, or read elsewhere"
_VARIABLES = "what the variables hold that `map` reads"


class RowMap:
    """Applies a function to each row of a batch, one at a time.

    Formal guarantees: the function is given one row, so that no row can enter
    another, except through what Python functions keep and what variables hold,
    which is taken to be public. What it draws follows from a seed of its own
    for each row, which follows from a secret key of the step and from the
    number of the example: draws are independent and alike for all rows, and an
    example less changes none of those of the others.

    Args:
        function: function of the tensors of one row, `x`, `(x, y)` or `(x, y,
            sample_weight)`, which returns as many or other ones. It may have
            an argument `seed`, int64 of shape `[2]`.
        gather: `row_gathers.ArrayRows` or `ReaderRows` of a dict of parts.

    Attributes:
        function: as given.
        may_draw: bool, whether two views of a row may differ.
        reads: list of tensors, the handles of the variables that it reads.
        spec: dict of structures of `tf.TensorSpec`, of a row that it returns.

    Raises:
        ValueError: if the function keeps a state, draws without a seed, or
            returns tensors of unknown shape.
    """

    def __init__(self, function, gather):
        self.function = function
        self._takes_seed = "seed" in inspect.signature(function).parameters
        self.may_draw = self._takes_seed
        traced = _traced(
            self._map_row, gather.row_spec, tf.TensorSpec([2], tf.int64)
        )
        _check(traced)
        self.reads = _variables_read(traced.graph)
        self._calls_python = effects.calls_python(traced.graph)
        self.may_draw |= self._calls_python
        self.spec = keras.tree.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
        )

    @classmethod
    def chained(cls, first, function_of_inputs, gather, may_read):
        """A map whose inputs go through one function more.

        Args:
            first: `RowMap`, or None.
            function_of_inputs: function of the inputs of one row, `x`.
            gather: as of `RowMap`.
            may_read: `gradients.Sources`, the public variables: that function
                may read no others.

        Raises:
            ValueError: as `RowMap`, or if other variables are read.
            gradients.Unproven: if something may be stored.
        """
        first = first or cls(lambda *row: row, gather)
        _require_public(function_of_inputs, first.spec["x"], may_read)

        def function(*row, **seed):
            x, *targets = keras.utils.unpack_x_y_sample_weight(
                first.function(*row, **seed)
            )
            return (function_of_inputs(x), *targets)

        # `functools.wraps` would show AutoGraph the source of the first.
        function.__signature__ = inspect.signature(first.function)
        chained = cls(function, gather)
        # What comes after the first reads public ones.
        chained.reads = first.reads
        return chained

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was taken as public unchecked."""
        variables = (_VARIABLES,) if self.reads else ()
        return (*variables, _PYTHON) if self._calls_python else variables

    def __call__(self, parts, indices, key, views: int = 1):
        """Rows as the function makes them.

        Args:
            parts: dict of structures of tensors `[rows, ...]`.
            indices: int64 tensor `[rows]`, the numbers of the examples.
            key: int64 tensor `[2]`, secret, of this step.
            views: int, how often each row is made, with seeds of its own each
                time. Defaults to `1`.

        Returns:
            dict of structures of tensors `[rows * views, ...]`, the views of a
            row one after another.
        """
        parts, indices = keras.tree.map_structure(
            lambda t: tf.repeat(t, views, axis=0), (parts, indices)
        )
        rows = tf.size(indices)
        view = tf.range(rows, dtype=tf.int64) % views
        seeds = tf.stack(
            [tf.fill([rows], key[0]), key[1] + indices * views + view], 1
        )  # [rows * views, 2]
        return tf.map_fn(
            lambda arguments: self._map_row(*arguments),
            (parts, seeds),
            fn_output_signature=self.spec,
        )

    def _map_row(self, row, seed):
        keywords = {"seed": _derived_seed(seed, 0)} if self._takes_seed else {}
        arguments = [row["x"], row.get("y"), row.get("w")]
        while arguments[-1] is None:
            arguments.pop()
        with _FreshSeeds(seed) as scope:
            result = self.function(*arguments, **keywords)
        self.may_draw |= bool(scope.state_mapping)
        result = keras.utils.unpack_x_y_sample_weight(result)
        return {
            name: keras.tree.map_structure(
                tf.convert_to_tensor, keras.tree.lists_to_tuples(part)
            )
            for name, part in zip(("x", "y", "w"), result)
            if part is not None
        }


class _FreshSeeds(keras.StatelessScope):
    """Scope in which each seed generator of Keras gets a seed of the row."""

    def __init__(self, seed):
        super().__init__()
        self._seed = seed
        self._numbers = itertools.count(1)

    def get_current_value(self, variable):
        is_new = id(variable) not in self.state_mapping
        if is_new and variable.name == "seed_generator_state":
            fresh = _derived_seed(self._seed, next(self._numbers))
            self.state_mapping[id(variable)] = tf.cast(fresh, variable.dtype)
        return super().get_current_value(variable)

    def add_update(self, update):
        variable, _ = update
        if variable.name != "seed_generator_state":
            raise ValueError(
                "Expected a map that keeps no state, got one that assigns "
                f"'{variable.path}': one row would enter others. Compute the "
                "state beforehand, from public data."
            )
        super().add_update(update)


def _derived_seed(seed, number):
    """Derives the seed of a number from the seed of a row."""
    shifted = seed + tf.constant([number, 0], tf.int64)
    return tf.random.stateless_uniform([2], shifted, None, None, tf.int64)


def _require_public(function, row, may_read):
    """Checks that a function of a row reads and stores public values alone."""
    seed = np.zeros(2, np.int64)

    def seeded(row):
        with _FreshSeeds(tf.constant(seed)):
            return function(row)

    specs = keras.tree.map_structure(
        lambda s: tf.TensorSpec([1, *s.shape], s.dtype), row
    )
    vectorized.require_no_effect(seeded, specs, may_read)


def _traced(function, *specs):
    # With AutoGraph, as in `tf.data`: a function may branch on tensors.
    return tf.function(function).get_concrete_function(*specs)


def _variables_read(graph):
    """Handles of variables, not those of tables in which it looks up."""
    return [
        functions.origin(inner)
        for _, inner in graph.captures
        if inner.dtype == tf.resource
        and not all(
            op.type.startswith("LookupTableFind") for op in inner.consumers()
        )
    ]


def _check(traced):
    graph = traced.graph
    if effects.draws(graph):
        raise ValueError(
            "Expected a map whose draws follow from a seed, got one with draws "
            "of TensorFlow's own generator, which are the same in each run "
            "after `tf.random.set_seed`. Give it an argument `seed`, which is "
            "new for each draw, for `tf.image.stateless_random_...` and "
            "`tf.random.stateless_...`; or use layers of Keras."
        )
    if effects.written_resources(graph):
        raise ValueError(
            "Expected a map that keeps no state, got one that assigns to a "
            "variable: one row would enter others. For random numbers give it "
            "an argument `seed`, which is new for each draw."
        )
    for tensor in keras.tree.flatten(traced.structured_outputs):
        if not tensor.shape.is_fully_defined():
            raise ValueError(
                "Expected a map that returns tensors of known shape, got shape "
                f"{tensor.shape}. Set it, as by `tf.image.resize` or "
                "`tf.ensure_shape`."
            )
