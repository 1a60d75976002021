"""Per-example gradients of any Keras model: norms, sums, projections, rows."""

from collections.abc import Callable

import tensorflow as tf

from tf_dpsub.checks import check_choice
from tf_dpsub.gradients import zero_terms
from tf_dpsub.gradients.graph import (
    GraphGradients,
    MixesExamples,
    ReadsState,
    Sources,
    Unproven,
    UpdatesState,
)
from tf_dpsub.gradients.per_example import PerExampleGradients
from tf_dpsub.gradients.tracing import shared_integers
from tf_dpsub.gradients.vectorized import StoredGradients, one_by_one

IMPLEMENTATIONS = ("graph", "vectorized_map", "map_fn")


@tf.autograph.experimental.do_not_convert
def per_example_gradients(
    loss_fn: Callable,
    inputs,
    variables: list,
    implementation: str = "graph",
    loss_scale: float = 1.0,
    may_read: Sources | None = None,
    is_vectorizable: bool | None = None,
):
    """Builds the matrix of per-example gradients while a step is traced.

    Args:
        loss_fn: callable that takes `inputs` and returns losses of shape
            `[batch]` and a structure of tensors with a batch axis (such as
            predictions), or None.
        inputs: structure of tensors of static shape whose axis 0 is the batch.
        variables: list of trainable variables.
        implementation: string, `"graph"` for the walk of the traced graph,
            `"vectorized_map"` or `"map_fn"` for one example at a time.
            Defaults to `"graph"`.
        loss_scale: float, the constant by which `loss_fn` multiplied the
            losses for a low-precision backward pass; rows are divided by it
            in float32. Defaults to `1.0`.
        may_read: `Sources`, the variables that `loss_fn` may read, as they
            have public values, and its seeds. Defaults to `None`: the caller
            vouches for all variables that are read, and those of integers are
            taken to be secret keys.
        is_vectorizable: bool, whether `tf.vectorized_map` is known to run the
            model on inputs of these shapes. Defaults to `None`: it is tried.

    Returns:
        A `PerExampleGradients`, and the structure that `loss_fn` returned for
        the whole batch.

    Raises:
        Unproven: if `implementation="graph"` and a row is not proved to depend
            on its own example alone; names the operation.
        MixesExamples: if it is proved that one does not.
        UpdatesState: if a variable is assigned a value computed from the
            batch.
        ReadsState: if a variable is read that is none of `may_read`.
    """
    if implementation == "graph":
        with shared_integers():
            with zero_terms.left_out() as terms:
                losses, aux = loss_fn(inputs)
            flat = [tf.convert_to_tensor(t) for t in tf.nest.flatten(inputs)]
            return GraphGradients(
                losses, flat, variables, loss_scale, may_read, terms
            ), aux
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    map_function = getattr(tf, implementation)
    return one_by_one(
        loss_fn,
        inputs,
        variables,
        map_function,
        loss_scale,
        may_read,
        is_vectorizable,
    )


__all__ = [
    "GraphGradients",
    "IMPLEMENTATIONS",
    "MixesExamples",
    "PerExampleGradients",
    "ReadsState",
    "Sources",
    "StoredGradients",
    "Unproven",
    "UpdatesState",
    "one_by_one",
    "per_example_gradients",
]
