"""What follows the noise of a step, and may read public values alone."""

import contextlib

import tensorflow as tf

from tf_dpsub.gradients import ReadsState
from tf_dpsub.gradients.graph import effects, functions, sources
from tf_dpsub.layers import conversion
from tf_dpsub.primitives import replicas
from tf_dpsub.primitives.public_state import public_variables

_EAGER = "what regularizers, constraints and the optimizer read in eager steps"


@contextlib.contextmanager
def reading_public_values(model, *others):
    """A context in which an update of weights is traced.

    Formal guarantees: the update is post-processing of what was released, of
    weights and of the optimizer's state. A regularizer, a constraint, a
    schedule or an optimizer of a user that reads a metric would add a private
    result, without noise. In a graph all that is read is looked at, and Python
    functions, which may read anything, are refused; eager steps take it as
    public unchecked, and `assumptions` says so.

    Args:
        model: compiled `PrivateModel`, whose step is built.
        *others: further variables that may be read.

    Raises:
        ReadsState: if another variable is read, or a Python function called.
    """
    if tf.executing_eagerly() or not replicas.is_first_of_worker():
        # Others trace the same, and what they do while the first waits for
        # them is looked at. It goes on before they do.
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    public = set().union(
        *(
            sources.handles(variable)
            for variable in (
                *model.model.variables,
                *conversion.carrier_variables(model.model),
                *model.optimizer.variables,
                *public_variables(),
                *others,
            )
        )
    )
    for op in graph.get_operations()[before:]:
        if op.type.startswith("Collective"):
            # Its resources are the order of such operations.
            continue
        if effects.runs_python(op):
            raise ReadsState(
                "Expected regularizers, constraints and an optimizer that are "
                f"computed by TensorFlow, got {op.type} '{op.name}', which "
                "runs a Python function. It may read anything, a metric, say: "
                "private results would enter the weights without noise. "
                "Write it with operations of TensorFlow or Keras."
            )
        for read in op.inputs:
            if (
                read.dtype == tf.resource
                and id(functions.origin(read)) not in public
            ):
                raise ReadsState(
                    f"Expected regularizers, constraints and an optimizer "
                    f"that read weights alone, got {op.type} '{op.name}', "
                    "which reads another variable, a metric, say: private "
                    "results would enter the weights without noise. Leave it "
                    "out, or make it a weight of the model that is not "
                    "trained."
                )


def assumptions(model) -> tuple[str, ...]:
    """What updates of weights read that nobody looks at, for the statement."""
    return (_EAGER,) if model.run_eagerly else ()
