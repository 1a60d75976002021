"""The loss of a model with its own `compute_loss`, for each example."""

import keras
import tensorflow as tf
from keras import tree
from keras.src import backend

from tf_dpsub.gradients.graph import provenance
from tf_dpsub.gradients.graph.states import (
    PUBLIC,
    Mixed,
    Unproven,
    UpdatesState,
)

# A weighted sum of these is one for each example: its weights are public.
_LINEAR = frozenset({
    "AddN", "AddV2", "Cast", "ExpandDims", "Identity", "Mean", "Neg", "Pack",
    "PreventGradient", "Reshape", "Squeeze", "StopGradient", "Sub", "Sum",
})  # fmt: skip
_PRODUCTS = frozenset({"Mul"})
_QUOTIENTS = frozenset({"DivNoNan", "RealDiv"})


def has_own_loss(model):
    """Tells whether a model overrides `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


class OwnLoss:
    """Turns a model's own `compute_loss` into one number for each example.

    Entry `i` is what the method gives for a batch that holds example `i` alone.
    A method that mixes examples would give something there as well, which is
    not what it means: `check` wants its value for a batch to be proved to be a
    sum or mean of values of single examples.

    What the method gets by `super().compute_loss` is the loss of `compile`, for
    that example. Regularisers and `add_loss` are left out there: a private step
    adds them itself.

    Formal guarantees: nothing is released here. That no example enters
    another's entry follows from giving the method one at a time.

    Args:
        model: plain `keras.Model`.
        compiled_loss: `PerExampleLoss` of what `compile` was given, or None.
    """

    def __init__(self, model, compiled_loss):
        self._name = model.name

        def of_compile(y, y_pred, sample_weight=None):
            losses, _ = compiled_loss(y, y_pred, sample_weight)
            return tf.reduce_mean(losses)

        self._model = _beside(model, compiled_loss and of_compile)

    def __call__(self, x, y, y_pred, sample_weight):
        """Computes the loss of each example.

        Args:
            x: structure of tensors `[batch, ...]`, inputs.
            y: structure of tensors, targets; or None.
            y_pred: structure of tensors, outputs of the model.
            sample_weight: structure of tensors, or None.

        Returns:
            float32 tensor `[batch]`.
        """
        masks = [backend.get_keras_mask(t) for t in tree.flatten(y_pred)]
        arguments = (x, y, y_pred, sample_weight, masks)
        leaves = tree.flatten(arguments)

        def one_example(rows):
            rows = iter(rows)
            *data, masks = tree.pack_sequence_as(
                arguments,
                [
                    None if t is None else tf.expand_dims(next(rows), 0)
                    for t in leaves
                ],
            )
            for output, mask in zip(tree.flatten(data[2]), masks):
                if mask is not None:
                    backend.set_keras_mask(output, mask)
            return self._of_batch(*data)

        rows = [t for t in leaves if t is not None]
        if rows[0].shape[0] == 1:
            return tf.reshape(one_example([t[0] for t in rows]), [1])
        try:
            return tf.vectorized_map(one_example, rows, warn=False)  # [batch]
        except ValueError:
            # An operation that cannot be vectorised.
            return tf.map_fn(one_example, rows, fn_output_signature=tf.float32)

    def check(self, x, y, y_pred, sample_weight):
        """Checks that a loss of the whole batch is one of each example.

        To be called while a graph of all of them is traced.

        Args:
            x, y, y_pred, sample_weight: as for a call.

        Raises:
            ValueError: if it is not proved to be a sum or mean over them.
        """
        total = self._of_batch(x, y, y_pred, sample_weight)
        inputs = [
            t for t in tree.flatten((x, y, sample_weight)) if t is not None
        ]
        proof = provenance.Provenance(total.graph, inputs, inputs[0].shape[0])
        try:
            proof.require_no_effect(total.graph)
        except UpdatesState as error:
            raise UpdatesState(
                f"Expected a compute_loss of '{self._name}' that changes no "
                f"state, got one that does: {error} Leave metrics out of "
                "`compute_loss`, and pass them to `compile`."
            ) from error
        except Unproven:
            pass  # How gradients are computed is decided later.
        self._require_linear(total, proof)

    def _of_batch(self, x, y, y_pred, sample_weight):
        total = self._model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
        total = tf.cast(tf.convert_to_tensor(total), tf.float32)
        # One value for each example is meant as their mean.
        return tf.reduce_mean(total)

    def _require_linear(self, total, proof):
        waiting = [total]
        while waiting:
            tensor = waiting.pop()
            state = proof(tensor)
            if not isinstance(state, Mixed):
                continue
            op = tensor.op
            if op.type in _LINEAR:
                waiting.extend(op.inputs)
                continue
            private = [t for t in op.inputs if proof(t) is not PUBLIC]
            is_scaled = len(private) == 1 and (
                op.type in _PRODUCTS
                or (op.type in _QUOTIENTS and private[0] is op.inputs[0])
            )
            if not is_scaled:
                raise ValueError(
                    f"Expected a compute_loss of '{self._name}' that is a sum "
                    "or mean of one value for each example, which is not "
                    f"proved: {state.reason} ({op.type} "
                    f"'{op.name}'). Reduce over the batch last; or call "
                    "`self.add_loss` with one value for each example."
                )
            waiting.extend(private)


def of_batch(model, compile_loss, x, y, y_pred, sample_weight, training):
    """A model's own loss of a batch, for evaluation, as Keras computes it.

    Args:
        model: plain `keras.Model`.
        compile_loss: `CompileLoss` or None.
        x, y, y_pred, sample_weight, training: as for `compute_loss`.

    Returns:
        Scalar tensor.
    """
    loss = _beside(model, compile_loss)._compute_loss(
        x, y, y_pred, sample_weight, training
    )
    return keras.ops.mean(loss)


def _beside(model, compile_loss):
    """The model with another compiled loss, and no losses but that.

    The model itself is not changed.
    """
    beside = object.__new__(type(model))
    beside.__dict__.update(vars(model))
    beside.__dict__["_compile_loss"] = compile_loss
    beside.__dict__["_losses_override"] = [tf.zeros([])]
    return beside
