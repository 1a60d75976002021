"""Views of a weight: other shapes, orders and types of the same numbers."""

import dataclasses

import tensorflow as tf

from tf_dpsub.gradients.graph.constants import ConstantFolder, static_shape
from tf_dpsub.gradients.graph.states import Unproven
from tf_dpsub.gradients.rows import reshape

_VIEWS = frozenset(
    "Cast EnsureShape ExpandDims Identity Neg Reshape Squeeze Transpose".split()
)


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """Operations by which a tensor is read from a variable.

    Each number of the tensor is one of the variable, or its negative.

    Norms are the same on both sides, and gradients are pulled back without
    leaving float32, whatever the casts on the way.

    Attributes:
        source: the tensor that was read.
        ops: tuple of the operations on the way, first to last.
    """

    source: tf.Tensor
    ops: tuple

    def through(self, op):
        """The view with one more operation, or None if that is not a view."""
        if op.type not in _VIEWS:
            return None
        if op.type == "Transpose" and self.permutation(op) is None:
            return None
        return View(self.source, (*self.ops, op))

    @property
    def keeps_order(self):
        """True if it reads the same numbers in the same order."""
        return not any(op.type in ("Neg", "Transpose") for op in self.ops)

    def pull_back(self, gradient):
        """Gradient at the source, from one at the end of the view."""
        if self.keeps_order:
            return reshape(gradient, static_shape(self.source))
        return self.pull_back_rows(gradient[None])[0]

    def pull_back_rows(self, rows):
        """Gradients at the source, from a stack of them, `[batch, ...]`."""
        for op in reversed(self.ops):
            if op.type == "Neg":
                rows = -rows
            elif op.type == "Transpose":
                order = [0] * rows.shape.rank
                for after, before in enumerate(self.permutation(op)):
                    order[before + 1] = after + 1
                rows = tf.transpose(rows, order)
            else:
                shape = static_shape(op.inputs[0])
                rows = reshape(rows, [rows.shape[0], *shape])
        return rows

    @staticmethod
    def permutation(op):
        """The order of axes of a Transpose, list of int; None if not known."""
        try:
            return [int(a) for a in ConstantFolder()(op.inputs[1])]
        except Unproven:
            return None
