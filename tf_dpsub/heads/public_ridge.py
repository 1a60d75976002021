"""A start for a linear head: ridge regression on public examples."""

import dataclasses

import keras
import numpy as np
from keras import tree

from tf_dpsub.checks import check_positive
from tf_dpsub.data import public_origins
from tf_dpsub.heads import linear_head
from tf_dpsub.training import preprocessing

# By which a solution is multiplied, so that its outputs are logits.
SCALE = 10.0
PURPOSE = "that the head was started from"
# Multiples of the largest eigenvalue of the second moments.
_REGULARIZATIONS = 10.0 ** np.arange(-5, 1.1, 0.25)
# Examples whose features are computed at a time.
_CHUNK = 128


@dataclasses.dataclass(frozen=True)
class PublicRidge:
    """A solution on public examples.

    Attributes:
        regularization: float, as given, or as chosen.
        leave_one_out_accuracy: float, the share of the public examples that
            the solution on all others classifies correctly.
    """

    regularization: float
    leave_one_out_accuracy: float


def fit_public_ridge(
    model,
    x,
    y,
    *,
    regularization: float | None = None,
    scale: float = SCALE,
    allow_private: bool = False,
) -> PublicRidge:
    """Starts the head of a classifier by ridge regression on public examples.

    For features `f_i` and one-hot labels `e_i` less `1/K` for each of `K`
    classes it solves `(sum of f_i f_i^T + lambda I) W = sum of f_i (e_i -
    1/K)^T`. Call it before `make_private`, in the same process: the statement
    of the private model names the public examples, and `fit` raises where some
    of them are private. Files and copies of the weights do not tell what they
    come from. Go on with `heads.FullBatch(..., public_start=True)`.

    Formal guarantees: none, and none is needed, if the examples are public. No
    private example is read: the regularisation follows from public ones.

    Args:
        model: plain model of frozen features and one dense layer, as
            `tf_dpsub.models.feature_classifier` makes it.
        x: array, or structure of arrays, inputs of public examples.
        y: int array `[examples]`, labels.
        regularization: float, `lambda` as a multiple of the largest eigenvalue
            of `sum of f_i f_i^T`. Defaults to `None`, that with the smallest
            squared error of public examples, each left out once.
        scale: float, by which the solution is multiplied, so that its outputs
            are logits. Defaults to `10.0`.
        allow_private: bool, whether some of them may be private examples. The
            statement then says that epsilon does not cover these. Defaults to
            `False`.

    Returns:
        A `PublicRidge`.

    Raises:
        ValueError: if the model is no such classifier, or private; if labels
            are missing, no integers, or no classes; if lengths differ; if
            features are not finite, or all zero; or if an argument is out of
            range.

    Example:

    ```python
    plain = tf_dpsub.models.feature_classifier(features, num_classes=10)
    tf_dpsub.heads.fit_public_ridge(plain, x_public, y_public)
    model = tf_dpsub.make_private(plain)
    head = tf_dpsub.heads.FullBatch(
        len(x), epsilon=0.2, delta=1e-5, public_start=True
    )
    ```
    """
    if isinstance(model, keras.Model) and hasattr(model, "ledger"):
        raise ValueError(
            f"Expected a plain model, got the private '{model.name}': its "
            "ledger would not know of this. Call `fit_public_ridge` before "
            "`make_private`."
        )
    head = linear_head.of(model)
    if regularization is not None:
        check_positive("regularization", regularization)
    check_positive("scale", scale)
    x = tree.map_structure(np.asarray, x)
    classes = head.kernel.shape[1]
    y = _checked_labels(y, len(tree.flatten(x)[0]), classes)
    ridge = Ridge(_features(model, head, x), y, classes)
    if regularization is None:
        regularization = ridge.best_regularization()
    accuracy = np.mean(ridge.left_out(regularization).argmax(1) == y)
    public_origins.remember(
        x, head.trainable_variables, PURPOSE, allow_private=allow_private
    )
    head.kernel.assign(scale * ridge.solution(regularization))
    if head.bias is not None:
        head.bias.assign(np.zeros(classes))
    return PublicRidge(float(regularization), float(accuracy))


class Ridge:
    """Ridge regressions of one set of examples.

    Args:
        features: float64 array `[examples, k]`.
        labels: int array `[examples]`.
        classes: int, `K`.
    """

    def __init__(self, features, labels, classes):
        self._left, values, self._right = np.linalg.svd(
            features, full_matrices=False
        )
        self._values = values / values[0]
        self._targets = np.eye(classes)[labels] - 1 / classes  # [examples, K]
        self._largest = values[0]

    def best_regularization(self):
        """That with the smallest squared error of examples left out."""
        return min(
            _REGULARIZATIONS,
            key=lambda r: np.sum((self.left_out(r) - self._targets) ** 2),
        )

    def solution(self, regularization):
        """Weights `[k, K]`."""
        factors = self._values / (self._values**2 + regularization)
        products = self._left.T @ self._targets
        return self._right.T @ (factors[:, None] * products) / self._largest

    def left_out(self, regularization):
        """Outputs `[examples, K]`, each by the solution on all others."""
        shares = self._values**2 / (self._values**2 + regularization)
        outputs = self._left @ (
            shares[:, None] * (self._left.T @ self._targets)
        )
        leverages = np.sum(self._left**2 * shares, axis=1)  # [examples]
        residuals = (self._targets - outputs) / (1 - leverages)[:, None]
        return self._targets - residuals


def _checked_labels(y, examples, classes):
    if y is None:
        raise ValueError(
            "Expected labels of the public examples, got y=None. Unlabelled "
            "ones can make features (`tf_dpsub.models.image_features`)."
        )
    y = np.asarray(y).reshape(-1)
    if y.dtype.kind not in "biu":
        raise ValueError(
            f"Expected labels that are integers, got {y.dtype}. Pass the "
            "numbers of the classes, not one-hot vectors."
        )
    if len(y) != examples or examples == 0:
        raise ValueError(
            "Expected inputs and labels of the same number of public examples, "
            f"at least one, got {examples} and {len(y)}."
        )
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(
            f"Expected labels from 0 to {classes - 1}, got some from "
            f"{y.min()} to {y.max()}. Take examples of other classes out."
        )
    return y.astype(np.int64)


def outputs(model, x):
    """Outputs of a model for all inputs, worked through in chunks.

    Unlike `predict` it does not warn of tracing where several models do it.

    Args:
        model: plain `keras.Model`.
        x: array, or structure of arrays.

    Returns:
        Array `[examples, ...]`.
    """
    chunks = [
        model(
            tree.map_structure(lambda a: a[k : k + _CHUNK], x), training=False
        )
        for k in range(0, len(tree.flatten(x)[0]), _CHUNK)
    ]
    return np.concatenate(chunks)


def _features(model, head, x):
    """What the head is given of each example, float64 `[examples, k]`."""
    (x,) = preprocessing.preprocessed(model, (x,))
    of_inputs = keras.Model(model._inputs_struct, head.input)
    features = outputs(of_inputs, x).astype(np.float64)
    rows = np.isfinite(features).all(1)
    if not rows.all():
        raise ValueError(
            "Expected public examples with finite features, got "
            f"{np.sum(~rows)} of {len(rows)} with others. Take them out."
        )
    if not features.any():
        raise ValueError(
            "Expected features that are not all zero, got zeros for all "
            f"{len(rows)} public examples."
        )
    return features
