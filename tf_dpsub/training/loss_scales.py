"""Weights of classes and examples, which scale losses."""

import keras
import numpy as np
from absl import logging
from keras.src.trainers.data_adapters import data_adapter_utils

# Keras's own balanced weights are about 1; gradients that are a tenth of what
# they were are seldom clipped.
_SMALL = 0.1


def warn_of_small_weights(class_weight, sample_weight):
    """Warns of weights that leave little of the gradients beside the noise.

    Noise is in proportion to the clip, and clipping makes no gradient larger:
    weights such as 1 / (examples of a class) drown all of them.

    Formal guarantees: class weights are the user's, and public. What is said of
    the weights of examples is computed from private data, and says so.

    Args:
        class_weight: dict from classes to floats, or None.
        sample_weight: structure of arrays, or None.
    """
    if class_weight:
        largest = max(class_weight.values())
        if 0 < largest < _SMALL:
            logging.warning(
                "class_weight is %.3g at most: gradients are scaled far below "
                "l2_norm_clip, and the noise is not. "
                "Divide all weights by their mean.",
                largest,
            )
    if sample_weight is None:
        return
    arrays = [np.asarray(w) for w in keras.tree.flatten(sample_weight)]
    if all(w.size and 0 < w.max() < _SMALL for w in arrays):
        logging.warning(
            "sample_weight is below %g everywhere (this line is computed from "
            "private weights, and no epsilon covers it): gradients are scaled "
            "far below l2_norm_clip, and the noise is not. Divide all weights "
            "by a public number of their size.",
            _SMALL,
        )


def weights_of_examples(y, class_weight, sample_weight):
    """Weights of examples, where the user gives those of classes.

    Args:
        y: array of labels, or None.
        class_weight: dict from classes to floats, or None.
        sample_weight: structure of arrays, or None.

    Returns:
        `sample_weight`, or an array that stands for `class_weight`.

    Raises:
        ValueError: if class weights do not fit the data.
    """
    if class_weight is None:
        return sample_weight
    if sample_weight is not None or y is None:
        raise ValueError(
            "Expected class_weight with arrays x and y and without "
            "sample_weight. Put the weights into sample_weight."
        )
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
