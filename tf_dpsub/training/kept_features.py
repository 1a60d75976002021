"""Frozen features of private examples, computed once for a run and kept."""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable

import keras
import numpy as np
from absl import logging
from keras import tree
from keras.src.models.functional import Functional, operation_fn

from tf_dpsub.data.poisson_batches import PoissonBatches
from tf_dpsub.gradients import Sources, Unproven
from tf_dpsub.layers.frozen_features import FrozenFeatures
from tf_dpsub.training import own_loss
from tf_dpsub.training.proved_features import ProvedFeatures

# Inputs of a model that are features already: a dict with this key alone.
KEY = "kept_features"
# Features of more bytes are kept in a file.
_LARGEST_IN_MEMORY = 2**31
# Views that are drawn at a time.
_CHUNK = 1024


class KeptFeatures:
    """Computes the features of a model's inputs, and the model from features.

    Formal guarantees: an example is replaced by its features, one by one, as
    `training.proved_features` computes them; sensitivity and sampling stay what
    they are. Where an id is out of range, features are not numbers: the example
    contributes nothing. Each of the views that are kept of an example is a
    function of that example and of random numbers that are independent of all
    examples: they follow from a secret key, new for each run, and are alike for
    all examples. With these numbers given, all views together are one row of
    the data, and the mean of their gradients is clipped as one: what a step
    releases, its sensitivity and its event depend neither on the number of
    views nor on how many steps see them. Features are private. Files that hold
    them are readable by their owner alone, and deleted by `close`.

    Args:
        model: plain model that `has_frozen_features`.
    """

    def __init__(self, model):
        node, self._augmentation = _frozen_part(model)
        layer, augmentation = node.operation, self._augmentation
        self._head = keras.Function(
            list(node.output_tensors), model._outputs_struct
        )
        self._of_views = self._of_inputs = ProvedFeatures(
            lambda x: layer(x, training=False),
            layer.variables,
            layer.name,
            getattr(layer.features, "groups_of_like_length", None),
        )
        if augmentation is not None:
            self._of_inputs = ProvedFeatures(
                lambda x: layer(
                    augmentation(x, training=False), training=False
                ),
                [*augmentation.variables, *layer.variables],
                layer.name,
            )
        self._folder: str | None = None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was taken as public unchecked."""
        both = (*self._of_inputs.assumptions, *self._of_views.assumptions)
        return tuple(dict.fromkeys(both))

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
        """Computes the features of examples as they are, not augmented.

        Args:
            x: structure of arrays `[examples, ...]`, inputs of the model.

        Returns:
            dict of `KEY`, with a tuple of arrays `[examples, ...]`: NumPy
            arrays, or memory maps of files where they are large.

        Raises:
            ValueError: as `ProvedFeatures.in_chunks`.
        """
        x = tree.map_structure(np.asarray, x)
        shape = (len(tree.flatten(x)[0]),)
        kept: list = []
        for positions, features in self._of_inputs.in_chunks(x):
            kept = self._stored(kept, shape, positions, features)
        return {KEY: tuple(kept)}

    def of_views(self, batches: PoissonBatches, views: int) -> PoissonBatches:
        """Computes the features of views of each example, which are drawn once.

        Args:
            batches: `PoissonBatches` whose `map` makes views, `augmented`.
            views: int, of each example.

        Returns:
            `PoissonBatches` of the same draws, with all features of an example,
            as `of` has them.

        Raises:
            ValueError: as `of`.
        """
        shape = (batches.own_examples, views)
        kept: list = []
        first, targets = 0, []
        for parts in batches.views_drawn_once(views, max(1, _CHUNK // views)):
            x = tree.map_structure(
                lambda a: a.reshape(-1, *a.shape[2:]), parts.pop("x")
            )
            for positions, features in self._of_views.in_chunks(x):
                kept = self._stored(kept, shape, first + positions, features)
            first += len(tree.flatten(x)[0])
            targets.append(parts)
        together = tree.map_structure(lambda *a: np.concatenate(a), *targets)
        return batches.with_views(
            {KEY: tuple(kept)}, together.get("y"), together.get("w"), views
        )

    def augmented(self, batches: PoissonBatches) -> PoissonBatches:
        """Batches whose `map` does what comes before the features in training.

        Args:
            batches: `PoissonBatches` of inputs of the model.

        Raises:
            ValueError: if the layers before the features keep a state, read
                other variables than theirs, or draw numbers that follow from
                no seed.
            gradients.Unproven: if they store something of an example.
        """
        if self._augmentation is None:
            return batches
        return batches.with_map_of_inputs(
            self._augmented_row, Sources(self._augmentation.variables)
        )

    @property
    def is_augmented(self) -> bool:
        """Whether layers of the model come before the features."""
        return self._augmentation is not None

    def close(self):
        """Deletes what is kept in files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _augmented_row(self, x):
        x = tree.map_structure(lambda t: t[None], x)
        x = self._augmentation(x, training=True)
        return tree.map_structure(lambda t: t[0], x)

    def _stored(self, kept, shape, positions, features):
        """Arrays `[*shape, ...]` with the features of some positions."""
        if not kept:
            kept = self._allocated(shape, features)
        where = np.unravel_index(positions, shape)
        for array, feature in zip(kept, features, strict=True):
            array[where] = feature
        return kept

    def _allocated(self, shape, features):
        shapes = [(*shape, *f.shape[1:]) for f in features]
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
            shape[0],
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
        model: plain model. Layers without trained weights may come before the
            features.
    """
    return _frozen_part(model) is not None


def of_arrays(model, x):
    """Keeps features of arrays for a run, as `model.kept_features`.

    Args:
        model: `PrivateModel`, in a method that is `forgotten_afterwards`.
        x: its inputs, as `fit` takes them.

    Returns:
        The features, as `KeptFeatures.of` has them. None where there are none,
        or layers of the model come before them.

    Raises:
        ValueError: as `KeptFeatures.of`.
    """
    features = _of_model(model)
    are_arrays = all(hasattr(part, "__array__") for part in tree.flatten(x))
    if features is None or features.is_augmented or not are_arrays:
        return None
    model.kept_features = features
    return features.of(x)


def of_batches(model, batches: PoissonBatches, views: int) -> PoissonBatches:
    """Keeps features of batches of arrays, as `of_arrays` does.

    Where random numbers are drawn before the features, those of so many views
    of each example are kept. Those of one view would be the same at each step:
    none are kept.

    Args:
        model: as for `of_arrays`.
        batches: `PoissonBatches` of its inputs.
        views: int, of each example.

    Returns:
        `PoissonBatches` of features; `batches` where none are kept.

    Raises:
        ValueError: as `KeptFeatures.of`.
    """
    features = _of_model(model)
    if features is None or not batches.holds_arrays:
        return batches
    if not (features.is_augmented or batches.has_map):
        model.kept_features = features
        return batches.with_inputs(features.of(batches.inputs))
    if views == 1:
        return batches
    try:
        augmented = features.augmented(batches)
    except (ValueError, Unproven) as error:
        logging.info("Features are computed at each step: %s", error)
        return batches
    if not augmented.map_may_draw:
        return batches
    model.kept_features = features
    return features.of_views(augmented, views)


def _of_model(model):
    plain = model.model
    if not has_frozen_features(plain) or own_loss.has_own_loss(plain):
        return None
    return KeptFeatures(plain)


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


def _frozen_part(model):
    """The node of a `FrozenFeatures` that all outputs see the inputs through.

    Returns:
        Pair of the node, and of a model of the layers before it, which have no
        trained weights; None without any. None if there is no such node.
    """
    if type(model).call not in (Functional.call, keras.Sequential.call):
        # Its own does what its layers alone would not.
        return None
    if isinstance(model, keras.Sequential):
        model = model._functional
    if not isinstance(model, Functional):
        return None
    nodes = [
        node
        for depth in sorted(model._nodes_by_depth, reverse=True)
        for node in model._nodes_by_depth[depth]
        if not node.is_input
    ]
    for node in nodes:
        if not isinstance(node.operation, FrozenFeatures):
            continue
        before = _nodes_before(node, nodes)
        if not _hides_inputs(model, node, before, nodes):
            continue
        if not before:
            return node, None
        arguments = (*node.arguments.args, *node.arguments.kwargs.values())
        return node, keras.Model(model._inputs_struct, arguments[0])
    return None


def _nodes_before(node, nodes):
    """The nodes that a node depends on."""
    needed, before = _tensors(node.input_tensors), []
    for other in reversed(nodes):
        if needed & _tensors(other.output_tensors):
            needed |= _tensors(other.input_tensors)
            before.append(other)
    return before


def _hides_inputs(model, node, before, nodes):
    """Whether what comes before a node is seen by it alone, and not trained."""
    inside = {id(n) for n in (node, *before)}
    hidden = _tensors(tree.flatten(model.inputs))
    used = set()
    for other in (node, *before):
        used |= _tensors(other.input_tensors)
    for other in before:
        hidden |= _tensors(other.output_tensors)
    seen = _tensors(tree.flatten(model.outputs))
    for other in nodes:
        if id(other) not in inside:
            seen |= _tensors(other.input_tensors)
    return (
        hidden <= used
        and not hidden & seen
        and not any(
            getattr(other.operation, "trainable_variables", ())
            for other in before
        )
    )


def _tensors(tensors):
    return {id(tensor) for tensor in tensors}
