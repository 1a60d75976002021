"""Frozen features of private examples, computed once for a run and kept."""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import tree
from keras.src.models.functional import Functional, operation_fn

from tf_dpsub.data.poisson_batches import PoissonBatches
from tf_dpsub.gradients import vectorized
from tf_dpsub.gradients.graph import effects, provenance, sources, states
from tf_dpsub.gradients.tracing import trace
from tf_dpsub.layers.frozen_features import FrozenFeatures
from tf_dpsub.training import ids, own_loss

# Inputs of a model that are features already: a dict with this key alone.
KEY = "kept_features"
# Examples whose features are computed at a time.
_CHUNK = 128
# Features of more bytes are kept in a file.
_LARGEST_IN_MEMORY = 2**31


class KeptFeatures:
    """Computes the features of a model's inputs, and the model from features.

    Formal guarantees: the features of an example are a function of that
    example, of frozen weights and of constants: that is proved from the graph,
    or else they are computed for one example at a time, of which nothing may be
    stored. An example is replaced by its features, one by one; sensitivity and
    sampling stay what they are. Where an id is out of range, features are not
    numbers: the example contributes nothing. Features are private. Files that
    hold them are readable by their owner alone, and deleted by `close`.

    Args:
        model: plain model that `has_frozen_features`.

    Attributes:
        assumptions: tuple of strings, what was taken as public unchecked.
    """

    def __init__(self, model):
        node = _frozen_node(model)
        self._layer = node.operation
        self._head = keras.Function(
            list(node.output_tensors), model._outputs_struct
        )
        self.assumptions: tuple[str, ...] = ()
        self._functions: dict = {}
        self._folder: str | None = None

    def head(self, features: list, training=None):
        """Computes the outputs of the model from kept features.

        Args:
            features: list of tensors.
            training: bool, as for a layer. Defaults to `None`.

        Returns:
            Structure of tensors, as the model returns.
        """
        return self._head._run_through_graph(
            features, lambda op: operation_fn(op, training=training)
        )

    def of(self, x):
        """Computes the features of examples.

        Args:
            x: structure of arrays `[examples, ...]`, inputs of the model.

        Returns:
            dict of `KEY`, with a tuple of arrays `[examples, ...]`: NumPy
            arrays, or memory maps of files where they are large.

        Raises:
            ValueError: if features change a state, draw random numbers, read a
                variable that may have been written from private data, or store
                something else of an example.
        """
        x = tree.map_structure(np.asarray, x)
        count = len(tree.flatten(x)[0])
        groups = [(np.arange(count), x)]
        if hasattr(self._layer.features, "groups_of_like_length"):
            groups = self._layer.features.groups_of_like_length(x)
        kept = None
        for indices, part in groups:
            for rows, features in self._in_chunks(part):
                if kept is None:
                    kept = self._allocated(count, features)
                for array, feature in zip(kept, features, strict=True):
                    array[indices[rows]] = feature
        return {KEY: tuple(kept)}

    def _in_chunks(self, x):
        """Yields positions of some rows, and their features."""
        inputs = tree.flatten(x)
        shape = tuple(a.shape[1:] for a in inputs)
        if shape not in self._functions:
            self._functions[shape] = self._traced(x)
        count = len(inputs[0])
        for start in range(0, count, _CHUNK):
            # The last chunk is padded with its first row.
            rows = np.arange(start, start + _CHUNK)
            rows[rows >= count] = start
            kept = min(_CHUNK, count - start)
            chunk = tree.map_structure(lambda a: tf.constant(a[rows]), x)
            features = self._functions[shape](chunk)
            yield rows[:kept], [f.numpy()[:kept] for f in features]

    def close(self):
        """Deletes what is kept in files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _chunk_features(self, x):
        checked = ids.IdsInRange()
        with checked.watched():
            features = tree.flatten(self._layer(x, training=False))
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
            graph, inputs, _CHUNK, sources.Sources(self._layer.variables)
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
            self._row_features,
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
                sources.Sources(self._layer.variables),
            )
        except states.Unproven as error:
            raise ValueError(
                "Expected frozen features of one example that follow from it "
                f"and from weights alone, got '{self._layer.name}', in which "
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
                f"random numbers, got '{self._layer.name}', which does one of "
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
                self._layer.name,
                error,
            )
            self._require_nothing_stored(specs)
            function = self._one_by_one
        return tf.function(function, autograph=False, input_signature=[specs])

    def _allocated(self, count, features):
        shapes = [(count, *f.shape[1:]) for f in features]
        size = sum(
            int(np.prod(s)) * f.dtype.itemsize for s, f in zip(shapes, features)
        )
        if size <= _LARGEST_IN_MEMORY:
            return [np.empty(s, f.dtype) for s, f in zip(shapes, features)]
        if self._folder is None:
            # For its owner alone.
            self._folder = tempfile.mkdtemp(prefix="tf_dpsub_features_")
        logging.info(
            "Features of %d examples are kept in %s until the run ends: %.1f "
            "GiB.",
            count,
            self._folder,
            size / 2**30,
        )
        number = len(os.listdir(self._folder))
        return [
            np.lib.format.open_memmap(
                os.path.join(self._folder, f"{number + k}.npy"),
                mode="w+",
                dtype=f.dtype,
                shape=s,
            )
            for k, (s, f) in enumerate(zip(shapes, features))
        ]


def has_frozen_features(model) -> bool:
    """Returns whether a model is a function of frozen features of its inputs.

    Args:
        model: plain model.
    """
    return _frozen_node(model) is not None


def for_run(model, x) -> KeptFeatures | None:
    """Features to keep for a call of `fit`; None where there are none.

    Args:
        model: `PrivateModel`.
        x: inputs, as `fit` takes them. Features of arrays alone are kept.
    """
    plain = model.model
    if not has_frozen_features(plain) or own_loss.has_own_loss(plain):
        return None
    if isinstance(x, PoissonBatches):
        x = x.inputs
    are_arrays = all(hasattr(part, "__array__") for part in tree.flatten(x))
    return KeptFeatures(plain) if are_arrays else None


def forgotten_afterwards(method: Callable) -> Callable:
    """Wraps a method of `PrivateModel`: no features are kept after it."""

    @functools.wraps(method)
    def wrapped(model, *args, **kwargs):
        try:
            return method(model, *args, **kwargs)
        finally:
            if model.kept_features is not None:
                model.kept_features.close()
                model.kept_features = None

    return wrapped


def _frozen_node(model):
    """The node at which all inputs enter a `FrozenFeatures`, or None."""
    if type(model).call not in (Functional.call, keras.Sequential.call):
        # Its own does what its layers alone would not.
        return None
    if isinstance(model, keras.Sequential):
        model = model._functional
    if not isinstance(model, Functional):
        return None
    inputs = {id(t) for t in tree.flatten(model.inputs)}
    nodes = [
        node
        for of_depth in model._nodes_by_depth.values()
        for node in of_depth
        if not node.is_input and inputs & {id(t) for t in node.input_tensors}
    ]
    if len(nodes) != 1 or not isinstance(nodes[0].operation, FrozenFeatures):
        return None
    (node,) = nodes
    return node if {id(t) for t in node.input_tensors} == inputs else None


def _one_row(tensor):
    return tf.TensorSpec([1, *tensor.shape[1:]], tensor.dtype)
