"""Features of examples, proved to depend on their own example alone."""

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from absl import logging
from keras import tree

from tf_dpsub.gradients import vectorized
from tf_dpsub.gradients.graph import effects, provenance, sources, states
from tf_dpsub.gradients.tracing import trace
from tf_dpsub.training import ids

# Examples whose features are computed at a time.
_CHUNK = 128


class ProvedFeatures:
    """Computes features of examples by a function that lets none see another.

    Formal guarantees: the features of an example are a function of that
    example, of frozen weights and of constants: that is proved from the graph,
    or else they are computed for one example at a time, of which nothing may be
    stored. Where an id is out of range, features are not numbers.

    Args:
        function: function of a batch of inputs, gives a structure of tensors
            `[batch, ...]`.
        variables: list of variables that it may read.
        name: string, for messages.
        groups_of_like_length: function of inputs, gives pairs of the positions
            of some examples and of their inputs, of another shape perhaps.
            Defaults to `None`, one group.

    Attributes:
        assumptions: tuple of strings, what was taken as public unchecked.
    """

    def __init__(
        self,
        function: Callable,
        variables: list,
        name: str,
        groups_of_like_length: Callable | None = None,
    ):
        self._function = function
        self._variables = variables
        self._name = name
        self._groups_of_like_length = groups_of_like_length
        self.assumptions: tuple[str, ...] = ()
        self._traced_functions: dict = {}

    def in_chunks(self, x) -> Iterator[tuple]:
        """Yields the positions of some examples, and their features.

        Args:
            x: structure of NumPy arrays `[examples, ...]`.

        Yields:
            Pair of an int array `[rows]`, and of a list of arrays `[rows,
            ...]`.

        Raises:
            ValueError: if features change a state, draw random numbers, read a
                variable that may have been written from private data, or store
                something else of an example.
        """
        groups = [(np.arange(len(tree.flatten(x)[0])), x)]
        if self._groups_of_like_length is not None:
            groups = self._groups_of_like_length(x)
        for positions, part in groups:
            for rows, features in self._chunks_of_group(part):
                yield positions[rows], features

    def _chunks_of_group(self, x):
        inputs = tree.flatten(x)
        shape = tuple(a.shape[1:] for a in inputs)
        if shape not in self._traced_functions:
            self._traced_functions[shape] = self._traced(x)
        count = len(inputs[0])
        for start in range(0, count, _CHUNK):
            # The last chunk is padded with its first row.
            rows = np.arange(start, start + _CHUNK)
            rows[rows >= count] = start
            kept = min(_CHUNK, count - start)
            chunk = tree.map_structure(lambda a: tf.constant(a[rows]), x)
            features = self._traced_functions[shape](chunk)
            yield rows[:kept], [f.numpy()[:kept] for f in features]

    def _chunk_features(self, x):
        checked = ids.IdsInRange()
        with checked.watched():
            features = tree.flatten(self._function(x))
        inputs = tree.flatten(x)
        factors = checked.not_a_number(inputs, inputs[0].shape[0])
        if factors is None:
            return features
        return [
            f
            * tf.reshape(
                tf.cast(factors, f.dtype), [-1] + [1] * (len(f.shape) - 1)
            )
            if f.dtype.is_floating
            else f
            for f in features
        ]

    def _proved_features(self, x):
        """Features of a chunk, proved to depend on their own example alone."""
        features = self._chunk_features(x)
        inputs = tree.flatten(x)
        graph = inputs[0].graph
        proof = provenance.Provenance(
            graph, inputs, _CHUNK, sources.Sources(self._variables)
        )
        proof.require_no_effect(graph)
        for tensor in features:
            state = proof.require_per_example(tensor, "a frozen feature")
            if state != states.PerExample(0, 1, 1):
                raise states.Unproven(f"not one row for each example: {state}")
        return features

    def _one_by_one(self, x):
        """Features of a chunk, each computed in a batch of its own."""
        (example,) = (
            trace(
                self._chunk_features, tree.map_structure(_one_row, x)
            ).structured_outputs,
        )
        return tf.map_fn(
            vectorized.without_effect(
                self._row_features, sources.Sources(self._variables)
            ),
            x,
            fn_output_signature=[
                tf.TensorSpec(f.shape[1:], f.dtype) for f in example
            ],
        )

    def _row_features(self, x):
        """Features of one example."""
        x = tree.map_structure(lambda t: t[None], x)
        return [f[0] for f in self._chunk_features(x)]

    def _require_nothing_stored(self, specs):
        """Checks that no example enters the features of a later one."""
        try:
            vectorized.require_no_effect(
                self._row_features,
                specs,
                sources.Sources(self._variables),
            )
        except states.Unproven as error:
            raise ValueError(
                "Expected frozen features of one example that follow from it "
                f"and from weights alone, got '{self._name}', in which "
                f"{error}: one example would enter the features of others. "
                "Take that layer out."
            ) from error

    def _traced(self, x):
        """A function of a chunk of inputs, which lets no row see another."""
        specs = tree.map_structure(
            lambda a: tf.TensorSpec([_CHUNK, *a.shape[1:]], a.dtype), x
        )
        graph = trace(self._chunk_features, specs).graph
        if effects.draws(graph) or effects.written_resources(graph):
            raise ValueError(
                "Expected frozen features that keep no state and draw no "
                f"random numbers, got '{self._name}', which does one of "
                "these: an example would have other features at each step. "
                "Take that layer out, or pass `keep_features=False`."
            )
        if effects.calls_python(graph):
            self.assumptions = (
                "what Python functions of the features keep, or read elsewhere",
            )
        function = self._proved_features
        try:
            trace(function, specs)
        except states.Unproven as error:
            logging.warning(
                "Features of '%s' are computed one example at a time, which is "
                "slower (%s).",
                self._name,
                error,
            )
            self._require_nothing_stored(specs)
            function = self._one_by_one
        return tf.function(function, autograph=False, input_signature=[specs])


def _one_row(tensor):
    return tf.TensorSpec([1, *tensor.shape[1:]], tensor.dtype)
