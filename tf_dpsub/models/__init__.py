"""The networks of the papers, as plain Keras models that return logits."""

from collections.abc import Callable

from tf_dpsub.checks import check_choice
from tf_dpsub.models.batch_normalization import replace_batch_normalization
from tf_dpsub.models.cnn import gep_mnist_cnn, mnist_cnn
from tf_dpsub.models.feature_classifier import (
    feature_classifier,
    image_features,
    vector_features,
)
from tf_dpsub.models.language_models import (
    bert_classifier,
    gpt2,
    prompted_classifier,
    roberta_classifier,
)
from tf_dpsub.models.mlp import mlp
from tf_dpsub.models.partial_training import train_only
from tf_dpsub.models.resnet import (
    resnet20_gn,
    wide_resnet_gn,
    wrn28_2_gn,
    wrn28_4_gn,
)
from tf_dpsub.models.sentence_classifier import sentence_classifier

__all__ = [
    "NAMES",
    "TEXT_NAMES",
    "bert_classifier",
    "feature_classifier",
    "gep_mnist_cnn",
    "get",
    "gpt2",
    "image_features",
    "mlp",
    "mnist_cnn",
    "prompted_classifier",
    "replace_batch_normalization",
    "resnet20_gn",
    "roberta_classifier",
    "sentence_classifier",
    "train_only",
    "vector_features",
    "wide_resnet_gn",
    "wrn28_2_gn",
    "wrn28_4_gn",
]

NAMES: dict[str, Callable] = {
    "bert_classifier": bert_classifier,
    "gep_mnist_cnn": gep_mnist_cnn,
    "gpt2": gpt2,
    "mlp": mlp,
    "mnist_cnn": mnist_cnn,
    "prompted_classifier": prompted_classifier,
    "resnet20_gn": resnet20_gn,
    "roberta_classifier": roberta_classifier,
    "wide_resnet_gn": wide_resnet_gn,
    "wrn28_2_gn": wrn28_2_gn,
    "wrn28_4_gn": wrn28_4_gn,
}

# Models whose inputs are texts.
TEXT_NAMES = (
    "bert_classifier",
    "gpt2",
    "prompted_classifier",
    "roberta_classifier",
    "sentence_classifier",
)


def get(name: str, input_shape: tuple, num_classes: int, **kwargs):
    """Builds a model by its name.

    Args:
        name: str, one of `tf_dpsub.models.NAMES`.
        input_shape: tuple of ints, the shape of one example.
        num_classes: int, number of logits.
        **kwargs: further arguments of that model's function.

    Returns:
        A built `keras.Model`.

    Raises:
        ValueError: if no model has that name.

    Example:

    ```python
    data = tf_dpsub.data.load("digits")
    model = tf_dpsub.models.get("mlp", data.input_shape, data.num_classes)
    ```
    """
    check_choice("the name of a model", name, NAMES)
    return NAMES[name](
        input_shape=tuple(input_shape), num_classes=num_classes, **kwargs
    )
