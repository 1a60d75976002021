"""Per-example losses: what Keras would give for each example alone.

Keras reduces a batch to one number. A private step needs one number for each
example instead, and it must be the number which Keras itself would compute if
that example were the whole batch: the same loss, mask, weights and reduction.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import tree
from keras.src import backend
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileLoss

_MEANS = ("sum_over_batch_size", "mean")


class PerExampleLoss:
    """Turns the losses of `compile` into one number for each example.

    Keras's own `CompileLoss` goes on resolving output names, dicts, lists,
    `loss_weights`, outputs without a loss and strings such as `"ce"`; only the
    reduction of each loss is replaced. The `CompileLoss` itself is read, never
    changed, except that it is built if it was not.

    Entry `i` is the value of a batch that holds example `i` alone. Some
    consequences:

    | `reduction` | entry `i`, for losses `v` and weights `w` of the example |
    |---|---|
    | `"sum_over_batch_size"`, `"mean"` | mean of `v * w` |
    | `"sum"` | sum of `v * w` |
    | `"mean_with_sample_weight"` | sum of `v * w`, divided by the sum of `w` |
    | `"none"`, `None` | sum of `v * w`, which is what Keras differentiates |

    - A mean over a masked example counts its own unmasked entries; an example
      that is masked throughout has loss 0.
    - So the mean of these losses weighs examples alike, whatever their length,
      where Keras's loss of a masked batch weighs their entries alike.
    - A weight for each example is accepted for a loss of any rank. Class
      weights arrive as such weights.
    - Hinge losses take the labels of an example for 0 and 1, not -1 and 1, if
      all of its own are.
    - A loss that returns a single number for the batch, or a `Loss` that
      overrides `__call__`, is evaluated on one example at a time, by
      `tf.vectorized_map` of the loss alone.

    Formal guarantees: nothing is released here. If a loss computes its entries
    from their own examples alone, so does this: what follows it is element-wise
    or reduces other axes than the batch. A loss that has one entry for each
    example but mixes the examples in it has the right shape and passes; that no
    example enters another's entry must be proved from the graph.

    Args:
        compile_loss: `CompileLoss` of a compiled model, built or not. It has at
            least one loss.

    Raises:
        ValueError: if `compile_loss` has no loss.

    Example:

    ```python
    per_example = PerExampleLoss(CompileLoss("sparse_categorical_crossentropy"))
    losses, outputs = per_example(y, model(x))  # [batch], [[batch]]
    ```
    """

    def __init__(self, compile_loss):
        if all(loss is None for loss in tree.flatten(compile_loss._user_loss)):
            raise ValueError(
                "Expected at least one loss, got "
                f"loss={compile_loss._user_loss}. A model that learns from "
                "`add_loss` alone is compiled with `loss=None`."
            )
        self.compile_loss = compile_loss

    def build(self, y_true, y_pred):
        """Builds the `CompileLoss`, outside of the graph that will use it.

        Keras's losses are traced once in a graph that is thrown away, as Keras
        does before `fit`: the trackers of several outputs are created there,
        and none of them in a loop or a function. To be called in the scope of
        the distribution strategy, before the step is traced. Nothing is done
        if the `CompileLoss` is built already.

        Args:
            y_true: targets, or anything with their structure, shapes and
                dtypes, such as `keras.KerasTensor` or `tf.TensorSpec`.
            y_pred: predictions, or likewise.
        """
        if not self.compile_loss.built:
            backend.compute_output_spec(
                self.compile_loss, *tree.map_structure(_spec, (y_true, y_pred))
            )

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Computes the loss of each example.

        Args:
            y_true: targets, in a structure that the `CompileLoss` accepts, with
                a static batch size.
            y_pred: predictions of the model, likewise.
            sample_weight: weights, `[batch]` or of the rank of the losses; one
                for all outputs or one for each. Defaults to `None`.

        Returns:
            A tuple `(losses, outputs)`: the weighted sum of all losses, and a
            list of the losses of each output, before `loss_weights`. If the
            `CompileLoss` tracks each output, `outputs` is in the order of its
            `metrics`. All are float32 of shape `[batch]`.

        Raises:
            ValueError: if a loss has no value for each example alone, or
                targets, predictions or weights have no common batch axis.
        """
        self.build(y_true, y_pred)
        batch_size = _batch_size(y_true, y_pred)
        outputs = []

        def per_example(loss):
            def call(y_true, y_pred, sample_weight):
                outputs.append(
                    _losses(loss, y_true, y_pred, sample_weight, batch_size)
                )
                return outputs[-1]

            return call

        resolver = _Resolver(self.compile_loss, per_example)
        total = resolver(y_true, y_pred, sample_weight)
        return tf.cast(total, tf.float32), outputs


class _Resolver(CompileLoss):
    """A built `CompileLoss` with other losses and no trackers.

    Args:
        compile_loss: `CompileLoss`, built. It is not changed.
        replace: function of a loss that gives the one to call in its place.
    """

    def __init__(self, compile_loss, replace: Callable):
        self.__dict__.update(vars(compile_loss))
        self._flat_losses = [
            flat._replace(loss=replace(flat.loss))
            for flat in compile_loss._flat_losses
        ]
        # Keras goes through losses and trackers in parallel: an empty list
        # would drop all losses but the first.
        self._metrics = [None] * len(self._flat_losses)


def _spec(x):
    if x is None:
        return None
    return keras.KerasTensor(
        tuple(x.shape), keras.backend.standardize_dtype(x.dtype)
    )


def _batch_size(y_true, y_pred):
    leaves = tree.flatten((y_true, y_pred))
    shape = next(x.shape for x in leaves if x is not None)
    if not shape.rank or shape[0] is None:
        raise ValueError(
            "Expected a static batch size, got targets of shape "
            f"{shape}. Batch with `drop_remainder=True`, or set the shape with "
            "`tf.ensure_shape`."
        )
    return shape[0]


def _losses(loss, y_true, y_pred, sample_weight, batch_size: int):
    """Computes one loss for each example.

    Args:
        loss: `keras.losses.Loss`.
        y_true: targets of this loss, a tensor or a structure of them.
        y_pred: predictions of this loss, likewise.
        sample_weight: tensor, or `None`.
        batch_size: int, the length of every first axis.

    Returns:
        A float32 tensor of shape `[batch]`.
    """
    for what, leaves in (
        ("targets", tree.flatten(y_true)),
        ("predictions", tree.flatten(y_pred)),
        ("a mask", [backend.get_keras_mask(y_pred)]),
        ("sample weights", [sample_weight]),
    ):
        for x in leaves:
            if x is not None and (not x.shape.rank or x.shape[0] != batch_size):
                raise ValueError(
                    f"Expected {what} with first axis {batch_size}, the batch "
                    f"size, for the loss '{loss.name}', got shape {x.shape}. "
                    "Without a common batch axis no value belongs to one "
                    "example: put the batch first."
                )
    if _is_pairwise(loss):
        raise ValueError(
            f"Expected a loss of one example, got '{loss.name}': the circle "
            "loss compares the examples of a batch with each other, and of one "
            "example alone it is constant. Give it public references, as in "
            "`lambda y, p: keras.losses.circle(y, p, ref_labels, "
            "ref_embeddings, remove_diagonal=False)`, or train with a loss of "
            "one example, such as cross-entropy."
        )
    if _overrides_call(loss):
        return _one_at_a_time(loss, y_true, y_pred, sample_weight, batch_size)
    values, mask = _call(loss, y_true, y_pred, batch_size)
    if values.shape.rank == 0:
        return _one_at_a_time(loss, y_true, y_pred, sample_weight, batch_size)
    weights = _weights(mask, sample_weight, loss.reduction)
    return _reduce(values, weights, loss.reduction)


def _is_pairwise(loss):
    return (
        getattr(loss, "fn", None) is keras.losses.circle
        and loss._fn_kwargs.get("ref_embeddings") is None
    )


def _is_hinge(loss):
    return getattr(loss, "fn", None) in (
        keras.losses.hinge,
        keras.losses.squared_hinge,
    ) and (type(loss).call is LossFunctionWrapper.call)


def _hinge(loss, y_true, y_pred):
    """Hinge losses, each example's labels taken for 0 and 1 by themselves.

    Keras takes those of a batch for 0 and 1, not -1 and 1, if no label in it
    is any other.
    """
    y_true, y_pred = squeeze_or_expand_to_same_rank(y_true, y_pred)
    axes = list(range(1, y_true.shape.rank))
    is_binary = tf.reduce_all((y_true == 0) | (y_true == 1), axes, True)
    y_true = tf.where(is_binary, 2 * y_true - 1, y_true)
    margins = tf.maximum(1 - y_true * y_pred, 0)
    if loss.fn is keras.losses.squared_hinge:
        margins = tf.square(margins)
    return tf.reduce_mean(margins, -1)


def _overrides_call(loss):
    """Tells whether mask, weights and reduction are left to the user."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


def _call(loss, y_true, y_pred, batch_size):
    """Computes the losses before mask, weights and reduction.

    Returns:
        A tuple `(values, mask)`: the losses in float32, a number or of shape
        `[batch, ...]`, and the mask that applies to them, or `None`.
    """
    masks = [backend.get_keras_mask(y_pred)]
    y_true, y_pred = tree.map_structure(
        lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype),
        (y_true, y_pred),
    )
    call = functools.partial(_hinge, loss) if _is_hinge(loss) else loss.call
    values = keras.ops.convert_to_tensor(call(y_true, y_pred))
    masks.append(backend.get_keras_mask(values))
    shape = values.shape
    if shape.rank is None or (
        shape.rank and shape[0] not in (None, batch_size)
    ):
        raise ValueError(
            f"Expected the loss '{loss.name}' to return a value for each of "
            f"{batch_size} examples, or a single number, got shape {shape}. "
            "A private step limits the share of every example, so each needs "
            "a loss of its own: reduce over all axes but the first."
        )
    if shape.rank and shape[0] is None:
        values = tf.ensure_shape(values, [batch_size, *shape[1:]])
    masks = [tf.cast(mask, tf.float32) for mask in masks if mask is not None]
    mask = None
    if len(masks) == 2:
        mask = tf.multiply(*_align(*masks))
    elif masks:
        mask = masks[0]
    return tf.cast(values, tf.float32), mask


def _one_at_a_time(loss, y_true, y_pred, sample_weight, batch_size):
    """Evaluates the loss on batches of one example."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if _overrides_call(loss) and replicas > 1:
        raise ValueError(
            f"Expected the loss '{loss.name}' to override `call`, got a class "
            "that overrides `__call__`. Keras's own divides a mean by the "
            f"number of replicas, {replicas}, and whether this one does is "
            "unknown. Override `call` to train on several replicas."
        )
    if batch_size == 1:
        return tf.reshape(_alone(loss, y_true, y_pred, sample_weight), [1])
    arguments = (
        y_true,
        y_pred,
        backend.get_keras_mask(y_pred),
        sample_weight,
    )
    leaves = tree.flatten(arguments)

    def one_example(rows):
        rows = iter(rows)
        y_true, y_pred, mask, sample_weight = tree.pack_sequence_as(
            arguments,
            [
                None if x is None else tf.expand_dims(next(rows), 0)
                for x in leaves
            ],
        )
        if mask is not None:
            backend.set_keras_mask(y_pred, mask)
        return _alone(loss, y_true, y_pred, sample_weight)

    return tf.vectorized_map(
        one_example, [x for x in leaves if x is not None], warn=False
    )  # [batch]


def _alone(loss, y_true, y_pred, sample_weight):
    """Computes the loss of a batch of one example, a float32 number."""
    if _overrides_call(loss):
        value = loss(y_true, y_pred, sample_weight)
        return tf.reduce_sum(tf.cast(value, tf.float32))
    values, mask = _call(loss, y_true, y_pred, batch_size=1)
    weights = _weights(mask, sample_weight, loss.reduction)
    if values.shape.rank == 0:
        if weights is None:
            return values
        if weights.shape.rank == 1:
            # Keras multiplies two numbers then, and has nothing to reduce.
            return values * weights[0]
        values = tf.reshape(values, [1] * weights.shape.rank)
    return _reduce(values, weights, loss.reduction)[0]


def _weights(mask, sample_weight, reduction):
    """Merges mask and sample weights into weights, or `None`."""
    if sample_weight is not None:
        sample_weight = tf.cast(sample_weight, tf.float32)
    if mask is None:
        return sample_weight
    if reduction in _MEANS:
        # The mean counts all entries: make up for those that are masked.
        mask *= tf.math.divide_no_nan(_size(mask), _sum(mask, keepdims=True))
    if sample_weight is None:
        return mask
    return tf.multiply(*_align(mask, sample_weight))


def _reduce(values, weights, reduction):
    """Reduces losses `[batch, ...]` and their weights to `[batch]`."""
    if weights is not None:
        values, weights = _align(values, weights)
        values = values * weights
    total = _sum(values)
    if reduction in _MEANS:
        return tf.math.divide_no_nan(total, _size(values))
    if reduction == "mean_with_sample_weight":
        divisor = _size(values) if weights is None else _sum(weights)
        return tf.math.divide_no_nan(total, divisor)
    return total


def _align(x, y):
    """Gives two tensors the same rank, as Keras does for one example."""
    x, y = squeeze_or_expand_to_same_rank(x, y)
    rank = max(x.shape.rank, y.shape.rank)
    if min(x.shape.rank, y.shape.rank) not in (1, rank):
        raise ValueError(
            "Expected losses, masks and sample weights of the same rank, or "
            f"one value for each example, got shapes {x.shape} and {y.shape}. "
            "Which entry weighs which is ambiguous: add the missing axes."
        )
    return [
        tf.reshape(t, [t.shape[0]] + [1] * (rank - 1))
        if t.shape.rank < rank
        else t
        for t in (x, y)
    ]


def _sum(x, keepdims=False):
    """Sums over all axes but the batch."""
    if x.shape.rank == 1:
        return x
    return tf.reduce_sum(x, list(range(1, x.shape.rank)), keepdims)


def _size(x):
    """Counts the entries of one example."""
    size = x.shape[1:].num_elements()
    if size is None:
        size = tf.size(x) // x.shape[0]
    return tf.cast(size, tf.float32)
