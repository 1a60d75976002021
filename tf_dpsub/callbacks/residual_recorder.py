"""Callback that records how close gradients are to low rank."""

import io

import numpy as np
import tensorflow as tf
from keras import tree

from tf_dpsub.analysis.distances import projection_residual
from tf_dpsub.analysis.spectra import stable_rank
from tf_dpsub.callbacks.gradient_recorders import GradientRecorder
from tf_dpsub.optimizers.dp_powersgd import matrix_shape


class ProjectionResidualRecorder(GradientRecorder):
    """Writes the share of public gradients that low-rank carriers miss.

    The file is a CSV table with a line for each epoch and kernel wider than the
    rank: `historical` and `self` are the shares `||G - P(G)|| / ||G||` of the
    mean gradient G that the carriers of the history of weights miss, and those
    of G itself, each the top singular vectors; `stable_rank` is
    `||G||_F^2 / ||G||_2^2`, and `stable_rank_of_history` the same for the
    history. It shows before private training whether RGP can work.

    Formal guarantees: nothing private is read but the released weights.
    Examples that are found in the private set raise.

    Args: as `ProjectionErrorRecorder`.
        rank: int, of the carriers. Defaults to `8`.

    Example:

    ```python
    recorder = tf_dpsub.callbacks.ProjectionResidualRecorder(
        x_held_out, y_held_out, "residual.csv", rank=8
    )
    ```

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352), Figures 2 and 3
    """

    def __init__(self, x, y, path, *, rank: int = 8, epochs=None):
        super().__init__(x, y, path, epochs=epochs)
        self._rank = rank

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._kernels = {
            v.path: v
            for v in self.model.trainable_variables
            # Biases of attention heads are matrices, and have no carriers.
            if v.name != "bias" and min(matrix_shape(v.shape)) > self._rank
        }
        # A resumed run began with other weights.
        file = self._path.with_name(f"{self._path.stem}_initial.npz")
        if not file.exists():
            buffer = io.BytesIO()
            np.savez(buffer, **{k: v.numpy() for k, v in self._kernels.items()})
            self._replace(buffer.getvalue(), file)
        with np.load(file) as arrays:
            self._initial = dict(arrays)

    def _record(self, epoch):
        rows = [row for row in self._rows() if int(row["epoch"]) < epoch]
        for path, gradient in self._mean_gradients().items():
            shape = matrix_shape(gradient.shape)
            history = self._kernels[path].numpy() - self._initial[path]
            gradient, history = (
                a.reshape(shape).astype(np.float64) for a in (gradient, history)
            )
            rows.append(
                {
                    "epoch": epoch,
                    "kernel": path,
                    "historical": projection_residual(
                        gradient, history, self._rank
                    ),
                    "self": projection_residual(gradient, gradient, self._rank),
                    "stable_rank": stable_rank(gradient),
                    "stable_rank_of_history": stable_rank(history),
                }
            )
        self._write_rows(rows)

    def _mean_gradients(self):
        variables = [v.value for v in self._kernels.values()]

        @tf.function(autograph=False)
        def mean_gradients(x, y):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                predicted = self.model(x, training=False)
                loss = self.model._compile_loss(y, predicted)
            return [
                tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)
            ]

        totals = [0.0] * len(variables)
        for part in self._chunks():
            size = len(tree.flatten(part["x"])[0])
            means = mean_gradients(part["x"], part["y"])
            totals = [t + size * g.numpy() for t, g in zip(totals, means)]
        return {k: t / self._examples for k, t in zip(self._kernels, totals)}
