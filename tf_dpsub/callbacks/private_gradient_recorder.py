"""Callback that keeps private gradients, for an analysis of their spectrum."""

import re

import keras
import tensorflow as tf
from absl import logging

from tf_dpsub.analysis.gradient_store import GradientStore
from tf_dpsub.checks import check_count


class PrivateGradientRecorder(keras.callbacks.Callback):
    """Keeps the mean clipped gradient of some steps on disk, without noise.

    That is the sum which the step releases with noise, divided by the batch
    size, of a model that `DPSGD` trains. When the folder has its largest size,
    a warning says so, and no more gradients are kept; training goes on.

    Formal guarantees: none. What is kept is computed from private data without
    noise, and no epsilon covers it; the privacy statement of the model says so.
    It is for an analysis, and must not be released.

    Args:
        folder: string or path-like, for a `tf_dpsub.analysis.GradientStore`; if
            it holds one of the same weights, it is continued.
        every: int, the number of steps from one gradient that is kept to the
            next. Defaults to `1`.
        weights: tuple of string, regular expressions of the paths of the
            weights whose gradients are kept. Defaults to `None`: all that are
            trained.
        dtype: string, `"float32"` or `"float16"`, of the file. Defaults to
            `"float32"`.
        max_bytes: int, the largest size of the file. Defaults to `None`: no
            bound.

    Attributes:
        store: `tf_dpsub.analysis.GradientStore`, from the first `fit` on.

    Raises:
        ValueError: in `fit`, if the model is not private, its optimizer
            releases something else, several devices train, an expression fits
            no weight, or the folder holds gradients of another model.

    Example:

    ```python
    recorder = tf_dpsub.callbacks.PrivateGradientRecorder(
        "gradients", every=5, weights=("query", "value"), max_bytes=10**10
    )
    model.fit(x, y, epochs=3, callbacks=[recorder])
    spectrum = tf_dpsub.analysis.top_singular_values(recorder.store, 100)
    ```

    Reference:
        - [Li et al., 2022](https://arxiv.org/abs/2207.00160), section 4.1
    """

    def __init__(
        self,
        folder,
        *,
        every: int = 1,
        weights: tuple | None = None,
        dtype: str = "float32",
        max_bytes: int | None = None,
    ):
        super().__init__()
        check_count("every", every)
        self.store = None
        self._folder, self._every = folder, every
        self._patterns = weights
        self._dtype, self._max_bytes = dtype, max_bytes

    def on_train_begin(self, logs=None):
        self._check_model()
        chosen = self._chosen()
        self.store = GradientStore.create(
            self._folder,
            [self.model.trainable_variables[k] for k in chosen],
            dtype=self._dtype,
            max_bytes=self._max_bytes,
        )
        self._sums = [
            tf.Variable(tf.zeros(shape, tf.float64), trainable=False)
            for shape in (v["shape"] for v in self.store.variables)
        ]

        def observe(sums):
            for variable, k in zip(self._sums, chosen, strict=True):
                variable.assign(tf.cast(sums[k], tf.float64))

        self.model.current_run.observe_sums(
            observe, f"the private gradients in {self.store.folder.name}"
        )
        self._next = self.model.ledger.steps + 1
        self._is_open = True

    def on_train_batch_end(self, batch, logs=None):
        step = self.model.ledger.steps
        if not self._is_open or step < self._next:
            return
        self._next = step + self._every
        if self.store.is_full:
            self._close(
                f"which may take {self.store.max_bytes:,} bytes, is full"
            )
            return
        size = self.model.optimizer.batch_size
        try:
            self.store.append([v.numpy() / size for v in self._sums], step)
        except OSError as error:
            self._close(f"could not be written: {error}")

    def _close(self, reason):
        self._is_open = False
        logging.warning(
            "No more gradients are kept: %s, with %d of them, %s.",
            self.store.folder,
            len(self.store),
            reason,
        )

    def _check_model(self):
        optimizer = getattr(self.model, "optimizer", None)
        if getattr(self.model, "training_step", None) is None:
            raise ValueError(
                "Expected a private model for PrivateGradientRecorder, got "
                f"'{self.model.name}'. Wrap it: `tf_dpsub.make_private(model)`."
            )
        shapes = [v.shape for v in self.model.trainable_variables]
        if list(map(tuple, optimizer.sum_shapes())) != list(map(tuple, shapes)):
            raise ValueError(
                "Expected an optimizer that releases a sum of gradients, as "
                "DPSGD, for PrivateGradientRecorder, got "
                f"{type(optimizer).__name__}."
            )
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                f"Expected one device for PrivateGradientRecorder, got "
                f"{replicas}. Train without a distribution strategy."
            )

    def _chosen(self):
        """Indices of the trainable variables whose gradients are kept."""
        paths = [v.path for v in self.model.trainable_variables]
        patterns = (".",) if self._patterns is None else self._patterns
        for pattern in patterns:
            if not any(re.search(pattern, path) for path in paths):
                raise ValueError(
                    "Expected expressions that fit a trainable weight of "
                    f"'{self.model.name}', got {pattern!r}. Its weights are "
                    f"{', '.join(paths)}."
                )
        return [
            k
            for k, path in enumerate(paths)
            if any(re.search(pattern, path) for pattern in patterns)
        ]
