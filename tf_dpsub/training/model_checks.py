"""Which models can be trained privately, and what is taken as public."""

import os

import keras
import tensorflow as tf

from tf_dpsub.models import batch_normalization

# Environment variables, and values of them that leave float32 as it is.
_NARROWING = (
    "TF_ENABLE_AUTO_MIXED_PRECISION",
    "TF_SET_ONEDNN_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)
_STRICT = ("", "0", "false", "strict")


def check_model(model):
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected a keras.Model, got {type(model).__name__}.")
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            "Expected a model with Keras's own train_step, got "
            f"'{model.name}', whose {type(model).__name__} overrides it: what "
            "it does would not happen in private training. Leave it out: "
            "compute in `call` what the loss needs, and there call "
            "`self.add_loss(losses)` with one value for each example, of shape "
            "[batch]; or override `compute_loss`."
        )
    if not model.built:
        raise ValueError(
            f"Expected a built model, got '{model.name}', whose weights do not "
            "exist yet. Give it a `keras.Input`, or call it once on a batch."
        )
    check_layers(model)


def check_layers(model):
    if not model.trainable_variables:
        raise ValueError(
            f"Expected a model with trainable weights, got '{model.name}', "
            "which has none. Set `trainable = True` on the layers to train."
        )
    mixing = batch_normalization.trainable_batch_normalizations(model)
    if mixing:
        names = [f"'{layer.name}'" for layer in mixing[:3]]
        if len(mixing) > 3:
            names[2:] = [f"{len(mixing) - 2} more"]
        raise ValueError(
            f"Expected layers that treat examples alike, alone or in a batch, "
            f"got BatchNormalization {', '.join(names)}, which mix them and "
            "store their statistics. Replace them all: "
            "`tf_dpsub.models.replace_batch_normalization(model)`; or freeze "
            "them: `layer.trainable = False`."
        )


def require_full_precision():
    """Refuses what narrows float32 where the graph does not say so.

    Formal guarantees: what is clipped is what is summed only if both are
    computed as written. TensorFlow's rewriting of graphs to float16 or bfloat16
    comes after the step was proved, and moved a sum by 1.59 C.

    Raises:
        ValueError: names the option or variable, and the cure.
    """
    # Sums over the batch need full float32 precision.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    options = tf.config.optimizer.get_experimental_options()
    on = [
        f"the option {name}"
        for name, value in options.items()
        if name.startswith("auto_mixed_precision") and value
    ]
    on += [
        f"{name}={value} in the environment"
        for name, value in os.environ.items()
        if name.startswith(_NARROWING) and value.lower() not in _STRICT
    ]
    if on:
        raise ValueError(
            "Expected float32 to be computed as such, got "
            f"{' and '.join(on)}: sums of clipped gradients would be narrowed. "
            "Turn it off; for mixed precision use a dtype policy of Keras, "
            '`keras.config.set_dtype_policy("mixed_bfloat16")`, which is '
            "accounted for."
        )


def public_assumptions(model):
    """What the statement has to take as public."""
    adapted = (
        keras.layers.Normalization,
        keras.layers.TextVectorization,
        keras.layers.StringLookup,
        keras.layers.IntegerLookup,
        keras.layers.Discretization,
    )
    layers = model._flatten_layers()
    return tuple(
        f"the {what} of {type(layer).__name__} '{layer.name}'"
        for layer in layers
        for what, holds in (
            ("adapted state", isinstance(layer, adapted)),
            ("statistics", batch_normalization.has_statistics(layer)),
        )
        if holds
    )
