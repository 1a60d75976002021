"""Variables and seeds that a per-example loss may read."""

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_dpsub.gradients.graph import effects, functions, seeds
from tf_dpsub.gradients.graph.states import (
    PUBLIC,
    Key,
    Mixed,
    ReadsState,
    Unproven,
)
from tf_dpsub.gradients.per_example import tf_variable

# How the draws of a seed are used: each example has its own, or one draw
# serves all examples of the step.
EACH, ALL = "each", "all"


class Sources:
    """Variables that a loss may read, and the seeds that it may draw from.

    Formal guarantees: public means known beforehand. A variable that is not
    named here may have been written by a step from its batch, as metrics are:
    a loss that reads one is refused.

    Args:
        weights: list of variables with public values, seeds left out.
        seeds: list of the state variables of seed generators, to which the
            loss assigns secret keys before it draws. Defaults to `()`.

    Attributes:
        uses: dict from the position of a seed in `seeds` to `EACH` or `ALL`,
            as the proof found; None before anything was proved.
    """

    def __init__(self, weights, seeds: list | tuple = ()):
        self._kinds: dict = {}
        for variable in weights:
            self._add(variable, PUBLIC)
        for k, variable in enumerate(seeds):
            self._add(variable, Key(frozenset([(k, None)])))
        self.uses: dict | None = None

    def _add(self, variable, state):
        for identity, handle in handles(variable).items():
            # While the handle is kept, no other object gets its identity.
            self._kinds[identity] = (state, handle)

    @property
    def handles(self):
        """Set of int, the identities of the handles of what may be read."""
        return set(self._kinds)

    def state(self, handle):
        """State of the handle of a variable, or of a table, in a graph."""
        outermost = functions.origin(handle)
        state, _ = self._kinds.get(id(outermost), (None, None))
        if state is not None:
            return state
        readers = {op.type for op in handle.consumers()}
        if readers and all(r.startswith("LookupTableFind") for r in readers):
            # From now on it counts as one of those that nothing may write.
            self._kinds[id(outermost)] = (PUBLIC, outermost)
            return PUBLIC
        return Mixed(f"reads {_described(handle)}", False)

    def require_readable(self, graph, used_by: set | None = None):
        """Checks what a graph reads.

        Args:
            graph: `tf.Graph`.
            used_by: set of the operations that count. Defaults to `None`, all
                of the graph.

        Raises:
            ReadsState: names what is not known to be public, or random
                numbers that are not secret.
            UpdatesState: if it changes a seed as no `SeedGenerator` does.
        """
        seeded = effects.draws_with_public_seed(graph)
        if seeded:
            raise ReadsState(
                f"Expected secret random numbers, got {seeded[0]} with a seed "
                "that is fixed in the program: who knows it would know which "
                "place in the batch an example had. Leave out `seed=` and op "
                "determinism, or draw from a `keras.random.SeedGenerator` that "
                "is an attribute of a layer."
            )
        captured = [
            inner
            for _, inner in getattr(graph, "captures", [])
            if inner.dtype == tf.resource
        ]
        seeds.require_kept(
            graph, [i for i in captured if isinstance(self.state(i), Key)]
        )
        for inner in captured:
            readers = set(inner.consumers())
            if used_by is not None:
                readers &= used_by
            if readers and isinstance(self.state(inner), Mixed):
                raise ReadsState(
                    f"Expected a loss of weights and constants alone, got one "
                    f"that reads {_described(inner)}, which is no weight of "
                    "the model. A step or a callback may have written it from "
                    "private data, as metrics are: it would lead from one "
                    "example to the gradients of others. Leave it out, or, if "
                    "only public values are ever written to it, make it a "
                    "weight of the model (`layer.add_weight(..., "
                    "trainable=False)`)."
                )

    def settle(self, uses: dict):
        """Records how seeds are used, the first time.

        Raises:
            Unproven: if they were used in another way before.
        """
        if self.uses is None:
            self.uses = uses
        if self.uses != uses:
            raise Unproven("random numbers are used in another way than before")


class AnySource:
    """Takes every variable as public, and those of integers as secret keys.

    For callers that vouch for what their loss reads.
    """

    def state(self, handle):
        """State of the handle of a variable in a graph."""
        data = handle_data_util.get_resource_handle_data(handle)
        if data.is_set and data.shape_and_type:
            if tf.as_dtype(data.shape_and_type[0].dtype).is_integer:
                return Key(frozenset([(handle.ref(), None)]))
        return PUBLIC

    def require_readable(self, graph, used_by: set | None = None):
        """Checks nothing."""

    def settle(self, uses: dict):
        """Records nothing."""


def handles(variable) -> dict:
    """Handles of a variable by identity: on replicas, of each of its copies."""
    variable = tf_variable(variable)
    copies = getattr(variable, "values", (variable,))
    return {id(copy.handle): copy.handle for copy in copies}


def _described(handle):
    data = handle_data_util.get_resource_handle_data(handle)
    shape = ""
    if data.is_set and data.shape_and_type:
        content = data.shape_and_type[0]
        dtype = tf.as_dtype(content.dtype).name
        shape = f" of shape {tf.TensorShape(content.shape)} and type {dtype}"
    readers = ", ".join(sorted({op.name for op in handle.consumers()})[:3])
    return f"a variable{shape} (by {readers})"
