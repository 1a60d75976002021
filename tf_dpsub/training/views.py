"""Views of an example: several augmentations of it, averaged before the clip.

The rows of a person are its views: some may be missing, which count as rows
without gradients.

The views of an example stand one after another on the batch axis of the model,
and the loss of the example is the mean of theirs: its gradient is the mean of
the gradients of its views, and one row.
"""

import dataclasses

import tensorflow as tf
from keras import tree
from keras.src import backend

# Parts of a batch that are of whole examples: which are real, and which views
# of each are given (1) or missing (0); without the latter all are given.
_OF_EXAMPLES = ("real", "rows")


@dataclasses.dataclass(frozen=True)
class Views:
    """Layout of the views of the examples of a batch.

    Attributes:
        count: int, views of an example that the model is given. Defaults to
            `1`.
        has_axis: bool, whether the parts of a batch, but for `real`, have an
            axis of views behind that of the batch: of `count`, or of 1 where
            all begin with the same numbers. Defaults to `False`.
    """

    count: int = 1
    has_axis: bool = False

    @classmethod
    def of_run(cls, count: int):
        """Views of the batches of a run that has so many."""
        return cls(count, has_axis=count > 1)

    def of_public(self, spec):
        """Views of public examples, which come without an axis.

        Those that were drawn beforehand in the run have one view: nothing
        augments public examples. Those that the model draws have as many.

        Args:
            spec: structure of `tf.TensorSpec` of a batch of the run.
        """
        if not self.has_axis:
            return self
        drawn = tree.flatten(spec["x"])[0].shape[1]
        return Views(1 if drawn > 1 else self.count, True)

    def without_axis(self, spec):
        """The spec of a batch of the run as it would be without views."""
        if not self.has_axis:
            return spec
        spec = {name: part for name, part in spec.items() if name != "rows"}
        return self._mapped(
            lambda s: tf.TensorSpec([s.shape[0], *s.shape[2:]], s.dtype), spec
        )

    def with_axis(self, batch):
        """A batch without an axis of views, with one of size 1."""
        return self._mapped(lambda t: t[:, None], batch)

    def merged(self, batch):
        """The rows of the model, `[batch * count, ...]`, but for `real`."""
        return self._mapped(self._merge, batch)

    def _mapped(self, function, batch):
        if not self.has_axis:
            return batch
        return {
            name: part
            if name in _OF_EXAMPLES
            else tree.map_structure(function, part)
            for name, part in batch.items()
        }

    def _merge(self, tensor):
        batch_size, drawn, *shape = tensor.shape
        if drawn < self.count:
            tensor = tf.tile(tensor, [1, self.count, *(1 for _ in shape)])
        return tf.reshape(tensor, [batch_size * self.count, *shape])

    def apart(self, tensor):
        """Rows of the model `[batch * count, ...]` as `[batch, count, ...]`."""
        if not self.has_axis:
            return tensor
        batch_size = tensor.shape[0] // self.count
        return _with_leading(tensor, 1, [batch_size, self.count])

    def together(self, tensor):
        """Rows of the model that `apart` took apart."""
        if not self.has_axis:
            return tensor
        return _with_leading(tensor, 2, [tensor.shape[0] * self.count])

    def mean(self, values, rows=None):
        """Means of the values of the views, `[batch]`.

        Args:
            values: tensor `[batch * count]`.
            rows: tensor `[batch, count]`, 0 where a view is missing: its value
                counts as 0. Defaults to `None`, all are given.
        """
        if not self.has_axis:
            return values
        values = self.apart(values)
        if rows is not None:
            values = tf.where(rows > 0, values, tf.zeros_like(values))
        return tf.reduce_mean(values, 1)

    def shared(self, values, rows=None):
        """Values `[batch]`, dealt out to the views that are given.

        Args:
            values: tensor `[batch]`.
            rows: as for `mean`.

        Returns:
            Tensor `[batch * count]`.
        """
        if not self.has_axis:
            return values
        dealt = tf.repeat(values / self.count, self.count)
        return dealt if rows is None else dealt * tf.reshape(rows, [-1])


def _with_leading(tensor, axes, sizes):
    """`tensor` with other sizes for its first axes, and so its Keras mask."""
    reshaped = tf.reshape(tensor, [*sizes, *tensor.shape[axes:]])
    mask = backend.get_keras_mask(tensor)
    if mask is not None:
        mask = tf.reshape(mask, [*sizes, *mask.shape[axes:]])
        backend.set_keras_mask(reshaped, mask)
    return reshaped
