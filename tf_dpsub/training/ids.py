"""Labels and ids out of range: an example that has one does not count."""

import contextlib

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_dpsub.gradients.graph.provenance import Provenance
from tf_dpsub.gradients.graph.sites import batch_first
from tf_dpsub.gradients.graph.states import PerExample
from tf_dpsub.gradients.tracing import operations_from

# Which input holds ids, by the operations that would raise: their messages
# hold labels of the batch.
_IDS = {
    "GatherV2": 1,
    "ResourceGather": 1,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
}


class IdsInRange:
    """Keeps ids in range while a loss is traced, and tells which were not.

    On a CPU TensorFlow ends a run by such an id, with a message that holds
    private values; elsewhere it computes something. Here id 0 takes its place,
    and the example is to be left out.

    Formal guarantees: whether an example is left out depends on its own ids.
    """

    def __init__(self):
        self._wrong: list = []

    @contextlib.contextmanager
    def watched(self):
        """A context in which operations that are traced get ids in range.

        Those within loops and branches are not seen: what they raise is
        raised without its values.
        """

        def create_in_range(create, op_type, inputs, *args, **kwargs):
            if op_type in _IDS:
                inputs = list(inputs)
                inputs[_IDS[op_type]] = self._in_range(op_type, inputs, kwargs)
            return create(op_type, inputs, *args, **kwargs)

        with operations_from(create_in_range):
            yield

    def _in_range(self, op_type, inputs, kwargs):
        ids = inputs[_IDS[op_type]]
        if tf.get_static_value(ids) is not None or (
            # The place that `tf.vectorized_map` reads a row from: no id.
            ids.op.type == "PlaceholderWithDefault"
        ):
            return ids
        count = tf.cast(_count(op_type, inputs), ids.dtype)
        wrong = (ids < 0) | (ids >= count)
        self._wrong.append(wrong)
        return tf.where(wrong, tf.zeros_like(ids), ids)

    def not_a_number(self, inputs: list, batch_size: int):
        """Factors for losses, which leave out examples with ids out of range.

        A gradient that is not a number counts for nothing.

        Args:
            inputs: list of the tensors, batch in front, that make the batch.
            batch_size: int.

        Returns:
            Float32 tensor `[batch]`: 1, or NaN; None where no id was seen.
        """
        wrong_by_input = [
            tf.reduce_any(tf.reshape(wrong, [batch_size, -1]), 1)
            for wrong in self._by_example(inputs, batch_size)
        ]
        if not wrong_by_input:
            return None
        return tf.where(
            tf.reduce_any(tf.stack(wrong_by_input), 0), float("nan"), 1.0
        )

    def _by_example(self, inputs, batch_size):
        """Whether ids were out of range, with the batch in front."""
        if batch_size == 1:
            return [tf.reshape(wrong, [1, -1]) for wrong in self._wrong]
        if not self._wrong:
            return []
        proof = Provenance(self._wrong[0].graph, inputs, batch_size)
        states = [proof(wrong) for wrong in self._wrong]
        # Those of no example are the model's own. Where it is not proved whose
        # they are, no row of the batch is used either.
        return [
            batch_first(wrong, state, batch_size)
            for wrong, state in zip(self._wrong, states)
            if isinstance(state, PerExample)
        ]


def _count(op_type, inputs):
    """Number of entries that there are to choose from."""
    if op_type == "SparseSoftmaxCrossEntropyWithLogits":
        return tf.shape(inputs[0])[-1]
    if op_type == "ResourceGather":
        data = handle_data_util.get_resource_handle_data(inputs[0])
        return data.shape_and_type[0].shape.dim[0].size
    axis = tf.get_static_value(inputs[2])
    if inputs[0].shape.rank is not None and axis is not None:
        size = inputs[0].shape[int(axis)]
        if size is not None:
            return size
    return tf.shape(inputs[0])[inputs[2]]
