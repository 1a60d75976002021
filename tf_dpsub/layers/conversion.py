"""Models with gradient carriers from plain ones, and back."""

import re
from collections.abc import Sequence

import keras

from tf_dpsub.checks import check_count
from tf_dpsub.layers.carriers import Reparametrized
from tf_dpsub.layers.conv2d import RGPConv2D
from tf_dpsub.layers.dense import RGPDense
from tf_dpsub.layers.einsum_dense import RGPEinsumDense
from tf_dpsub.layers.multi_head_attention import RGPMultiHeadAttention

# Subclasses of other packages may compute anything.
_TWINS = {twin.plain: twin for twin in (RGPDense, RGPConv2D, RGPEinsumDense)}


def reparametrize(
    model,
    rank: int,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
):
    """Gives the layers of a model low-rank gradient carriers.

    `Dense`, `Conv2D`, `EinsumDense` and `MultiHeadAttention` layers become
    their twins of `tf_dpsub.layers`, wherever they are nested, in place, as
    Keras's own `enable_lora` and `quantize` change layers. The outputs of the
    model and its weights stay the same. Layers that are frozen, or whose
    kernel is narrower than the rank, stay plain. Checkpoints are those of the
    plain model before, and after `merge`: Keras names layers in them by class.

    Args:
        model: built `keras.Model`.
        rank: int, the rank of the carriers. Call again, with other layers, for
            several ranks.
        include: list of string, regular expressions: layers whose path has
            none of them stay plain. Defaults to `None`, all layers.
        exclude: list of string, the same for layers to stay plain. Defaults to
            `None`, none.

    Returns:
        The model.

    Raises:
        ValueError: if nothing is left to convert, a pattern fits no layer, or
            a layer is not built, quantized, or has LoRA on.

    Example:

    ```python
    tf_dpsub.layers.reparametrize(classifier, rank=8, exclude=["logits"])
    model = tf_dpsub.make_private(classifier)
    model.compile(tf_dpsub.optimizers.RGP(keras.optimizers.Adam(1e-3), ...))
    ```

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
    """
    check_count("rank", rank)
    if not model.built:
        raise ValueError(
            f"Expected a built model, got '{model.name}', whose weights do not "
            "exist yet. Give it a `keras.Input`, or call it once on a batch."
        )
    chosen = _chosen(_of_types(model, _TWINS), include, exclude)
    for layer in chosen:
        _check(layer)
    fit = [layer for layer in chosen if _fits(layer, rank)]
    if not fit:
        raise ValueError(
            f"Expected a model with layers to reparametrize, got "
            f"'{model.name}': no Dense, Conv2D or EinsumDense layer is chosen "
            f"that is trainable and whose kernel is {rank} wide. Lower the "
            "rank, or choose others."
        )
    for layer in fit:
        _TWINS[type(layer)].convert(layer, rank)
    # An attention layer has this rank if all layers inside of it have it.
    for attention in _of_types(model, (keras.layers.MultiHeadAttention,)):
        inner = _of_types(attention, (keras.layers.EinsumDense, RGPEinsumDense))
        ranks = {getattr(layer, "carrier_rank", None) for layer in inner}
        if ranks == {rank}:
            RGPMultiHeadAttention.convert(attention, rank)
    return model


def carrier_ranks(model) -> dict:
    """Carrier ranks of the layers of a model that have one, by path.

    Args:
        model: `keras.Model`.

    Returns:
        Dict from string to int.
    """
    types = (*_TWINS.values(), RGPMultiHeadAttention)
    return {_path(v): v.carrier_rank for v in _of_types(model, types)}


def set_carrier_ranks(model, ranks):
    """Sets the ranks that `carrier_ranks` returned.

    The config of a model lacks those of layers inside of other layers.

    Args:
        model: `keras.Model`.
        ranks: dict from string to int.
    """
    for twin in (*_TWINS.values(), RGPMultiHeadAttention):
        for layer in _of_types(model, (twin.plain,)):
            if _path(layer) in ranks:
                twin.convert(layer, ranks[_path(layer)])


def merge(model):
    """Undoes `reparametrize`: all layers of a model are plain ones again.

    Nothing is computed: the kernel of a layer is always whole, and carriers
    only change how its gradient is learned.

    Args:
        model: `keras.Model`.

    Returns:
        The model.
    """
    for twin in (*_TWINS.values(), RGPMultiHeadAttention):
        for layer in _of_types(model, (twin,)):
            twin.restore(layer)
    return model


def reparametrized_layers(model) -> list:
    """The layers of a model, or inside of a layer, that have carriers.

    Args:
        model: `keras.Model`, or any Keras layer.

    Returns:
        List of `tf_dpsub.layers.Reparametrized` layers, each once.
    """
    layers = model._flatten_layers()
    reparametrized = [
        layer
        for layer in layers
        if isinstance(layer, Reparametrized) and layer.carriers is not None
    ]
    return list({id(layer): layer for layer in reparametrized}.values())


def carrier_variables(model) -> list:
    """Variables of gradient carriers, which follow from released weights."""
    return [
        variable
        for layer in reparametrized_layers(model)
        for variable in (layer.carriers.left, layer.carriers.right)
    ]


def _of_types(model, types):
    """The layers of exactly these types, each once."""
    layers = [v for v in model._flatten_layers() if type(v) in types]
    return list({id(layer): layer for layer in layers}.values())


def _path(layer):
    return layer.path or layer.name  # before it is built, it has no path


def _chosen(layers, include, exclude):
    for pattern in [*(include or []), *(exclude or [])]:
        if not any(re.search(pattern, _path(layer)) for layer in layers):
            paths = ", ".join(map(_path, layers))
            raise ValueError(
                f"Expected patterns that fit a layer, got {pattern!r}. Layers "
                f"that can be reparametrized are {paths or 'none'}."
            )

    def is_chosen(layer):
        def fits(patterns):
            return any(re.search(p, _path(layer)) for p in patterns)

        return (include is None or fits(include)) and not fits(exclude or [])

    return [layer for layer in layers if is_chosen(layer)]


def _check(layer):
    name = f"{type(layer).__name__} '{_path(layer)}'"
    if not layer.built:
        raise ValueError(
            f"Expected built layers, got {name}, which has no weights yet. "
            "Call the model once on a batch, or exclude the layer."
        )
    if layer.quantization_mode is not None:
        raise ValueError(
            f"Expected layers in floating point, got {name}, quantized to "
            f"{layer.quantization_mode}. Reparametrize before quantizing, or "
            "exclude the layer."
        )
    if layer.lora_enabled:
        raise ValueError(
            f"Expected layers without LoRA, got {name}, whose kernel is frozen "
            "beneath it. Train it by `tf_dpsub.optimizers.DPSGD`, or exclude "
            "the layer."
        )


def _fits(layer, rank):
    """Returns whether a layer is trainable, with a kernel of that rank."""
    if not layer._kernel.trainable:
        return False
    try:
        return _TWINS[type(layer)].narrow_side(layer) >= rank
    except ValueError:
        return False
