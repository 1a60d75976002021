"""Training of some kinds of weights alone."""

from collections.abc import Iterable

import keras

from tf_dpsub.checks import check_choice

KINDS = ("bias", "head", "lora", "norm")


def train_only(model, kinds: str | Iterable[str]) -> list:
    """Freezes all weights of a model but those of some kinds.

    Noise goes into every number that is trained: a pretrained model often
    learns more from few of them. BiTFiT trains biases and the head.

    | kind | weights |
    |---|---|
    | `"bias"` | all called `bias`, but those of normalizations |
    | `"norm"` | scales and offsets of layers with `Norm` in their names |
    | `"head"` | all of the last layer that has any, for each output |
    | `"lora"` | those that `enable_lora` of Keras has added |

    Weights are frozen one by one, by `variable.trainable`. Layers that are
    frozen as such (`layer.trainable = False`) stay so, and have no kinds. The
    private model that is made of it saves the choice; a file of the plain
    model does not, as Keras keeps it for whole layers only. To be called before
    `make_private`, or before `compile` with a new optimizer.

    Formal guarantees: nothing is released here. Per-example gradients, their
    clip and the noise are those of the weights that are trained; the others do
    not change.

    Args:
        model: built `keras.Model`.
        kinds: string or several, of `"bias"`, `"head"`, `"lora"`, `"norm"`.

    Returns:
        List of the variables that are trained.

    Raises:
        ValueError: if a kind is not known, or the model has no weight of it.

    Example:

    ```python
    tf_dpsub.models.train_only(plain_model, ("bias", "norm", "head"))
    model = tf_dpsub.make_private(plain_model)
    ```

    Reference:
        - [Bu et al., 2022](https://arxiv.org/abs/2210.00036)
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    by_kind = _weights_by_kind(model)
    has = ", ".join(f"{k} ({len(v)})" for k, v in by_kind.items() if v)
    if not kinds:
        raise ValueError(
            f"Expected one kind of weights at least, got none. '{model.name}' "
            f"has {has or 'no weights of any kind'}."
        )
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
        if not by_kind[kind]:
            raise ValueError(
                f"Expected kinds of weights that '{model.name}' has, got "
                f"{kind!r}. It has {has or 'none of any kind'}."
            )
    trained = {id(v) for kind in kinds for v in by_kind[kind]}
    for layer in _trainable_layers(model):
        for variable in layer._trainable_variables:
            variable.trainable = id(variable) in trained
    return model.trainable_variables


def frozen_weights(model) -> list:
    """Positions in `model.weights` of those that are frozen one by one."""
    frozen = {
        id(v)
        for layer in _trainable_layers(model)
        for v in layer._trainable_variables
        if not v.trainable
    }
    return [k for k, v in enumerate(model.weights) if id(v) in frozen]


def freeze_weights(model, positions):
    """Freezes the weights at positions that `frozen_weights` returned."""
    weights = model.weights
    for k in positions:
        weights[k].trainable = False


def _weights_by_kind(model):
    """Dict from kind to the list of the weights that are of it."""
    by_kind: dict[str, dict] = {kind: {} for kind in KINDS}
    heads = {
        id(part) for head in _heads(model) for part in head._flatten_layers()
    }
    for layer in _trainable_layers(model):
        is_norm = "norm" in type(layer).__name__.lower()
        for variable in layer._trainable_variables:
            name = variable.name
            kinds = set()
            if getattr(layer, "lora_enabled", False):
                if name.startswith("lora_"):
                    kinds.add("lora")
                elif name != "bias":
                    # What it adds to stays as it was.
                    continue
            if is_norm:
                kinds.add("norm")
            elif name == "bias":
                kinds.add("bias")
            if id(layer) in heads:
                kinds.add("head")
            for kind in kinds:
                by_kind[kind][id(variable)] = variable
    return {
        kind: list(variables.values()) for kind, variables in by_kind.items()
    }


def _trainable_layers(model):
    return [layer for layer in model._flatten_layers() if layer.trainable]


def _heads(model):
    """The last layer with weights before each output of a model."""
    if isinstance(model, keras.Sequential):
        return _last(model.layers)
    if not isinstance(model, keras.Model):
        return [model]
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if not outputs:
        return _last(model.layers)
    heads, waiting, seen = [], outputs, set()
    while waiting:
        tensor = waiting.pop()
        operation, node, _ = tensor._keras_history
        if (id(operation), node) in seen:
            continue
        seen.add((id(operation), node))
        if getattr(operation, "weights", None):
            heads += _heads(operation)
        else:
            waiting += operation._inbound_nodes[node].input_tensors
    return heads


def _last(layers):
    """The heads of the last of some layers that has weights."""
    for layer in reversed(layers):
        if layer.weights:
            return _heads(layer)
    return []
