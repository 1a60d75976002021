"""Callbacks that record properties of gradients, epoch by epoch."""

import csv
import io
import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tf_dpsub import files
from tf_dpsub.data import overlap

# Number of examples whose gradients are computed at a time, and of columns of
# these that are multiplied at a time in float64.
_CHUNK = 250
_COLUMNS = 2**14


class GradientRecorder(keras.callbacks.Callback):
    """Base of callbacks that record per-example gradients of given examples.

    Args:
        x: array, or structure of arrays, inputs as the model takes them.
        y: the same for targets.
        path: string or path-like, the file to write, which is continued.
        epochs: collection of int, the epochs after which it records, counted
            from 1. Defaults to `None`, all.

    Raises:
        ValueError: in `fit`, if the model is not private, or if examples are.
    """

    _reads_private_gradients = False

    def __init__(self, x, y, path, *, epochs=None):
        super().__init__()
        if len(tree.flatten(x)[0]) < 2:
            raise ValueError(
                "Expected two examples at least, got "
                f"{len(tree.flatten(x)[0])}."
            )
        self._data = {"x": x, "y": y}
        self._path = pathlib.Path(path)
        self._epochs = None if epochs is None else frozenset(epochs)

    def on_train_begin(self, logs=None):
        if getattr(self.model, "training_step", None) is None:
            raise ValueError(
                f"Expected a private model for {type(self).__name__}, got "
                f"'{self.model.name}'. Wrap it: `tf_dpsub.make_private(model)`."
            )
        private = self.model.current_run.inputs
        if private is not None and not self._reads_private_gradients:
            if overlap.count_common(self._data["x"], private):
                raise ValueError(
                    f"Expected public examples for {type(self).__name__}, got "
                    "private ones among them: what it writes is not covered by "
                    "any epsilon. PrivateSpectrumRecorder says so."
                )

    def on_epoch_end(self, epoch, logs=None):
        if self._epochs is None or epoch + 1 in self._epochs:
            self._record(epoch + 1)

    def _by_chunk(self, function):
        """Yields a function of the gradients of each chunk of examples."""

        @tf.function(autograph=False)
        def compute(batch):
            step = self.model.training_step
            gradients, _ = step.per_example_gradients(batch)
            return function(gradients)

        for part in self._chunks():
            size = len(tree.flatten(part["x"])[0])
            yield compute(part | {"real": tf.ones([size])})

    @property
    def _examples(self):
        return len(tree.flatten(self._data["x"])[0])

    def _chunks(self):
        """Yields the examples in chunks, dicts of tensors."""
        indices = np.arange(self._examples)
        for chunk in np.array_split(indices, -(-len(indices) // _CHUNK)):
            first, last = chunk[0], chunk[-1] + 1
            yield tree.map_structure(
                lambda a, first=first, last=last: tf.convert_to_tensor(
                    a[first:last]
                ),
                self._data,
            )

    def _rows(self):
        """Rows of the table that the file holds so far."""
        if not self._path.exists():
            return []
        return list(csv.DictReader(io.StringIO(self._path.read_text("utf-8"))))

    def _write_rows(self, rows):
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._replace(table.getvalue().encode())

    def _replace(self, content, path=None):
        """Writes a file as a whole: an interruption leaves the old one.

        Of several workers, only the chief writes.
        """
        if not self.model.distribute_strategy.extended.should_checkpoint:
            return
        files.write_bytes(path or self._path, content)


class ProjectionErrorRecorder(GradientRecorder):
    """Writes the share of public gradients that a run's subspace misses.

    The file is a CSV table with `epoch`, `group` and `error`: for each
    parameter group, and for `all` of them, the share of the energy (the sum of
    squared norms) of the gradients that lies outside of the subspace which the
    last step used. The examples must not be those that span it.

    Formal guarantees: nothing private is read. Examples that are found in the
    private set raise.

    Args: as `GradientRecorder`.

    Raises:
        ValueError: in `fit`, if the optimizer has no subspace.

    Example:

    ```python
    recorder = tf_dpsub.callbacks.ProjectionErrorRecorder(
        x_held_out, y_held_out, "projection_error.csv"
    )
    model.fit(x, y, epochs=30, callbacks=[recorder])
    ```
    """

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        if not hasattr(self.model.optimizer, "subspace"):
            raise ValueError(
                "Expected an optimizer with a subspace for "
                "ProjectionErrorRecorder, got "
                f"{type(self.model.optimizer).__name__}."
            )

    def _record(self, epoch):
        subspace = self.model.optimizer.subspace
        names = [*(group.name for group in subspace.groups), "all"]
        whole, inside = self._energies(subspace)
        rows = [row for row in self._rows() if int(row["epoch"]) < epoch]
        rows += [
            {"epoch": epoch, "group": name, "error": 1 - b / a if a else 0.0}
            for name, a, b in zip(names, whole, inside)
        ]
        self._write_rows(rows)

    def _energies(self, subspace):
        """Energies of gradients and of projections, by group and in total."""

        def of_chunk(gradients):
            parts = tf.split(subspace.project(gradients), subspace.ranks, 1)
            whole = [
                gradients.sq_norms([gradients.variables[k] for k in g.indices])
                for g in subspace.groups
            ]
            inside = [tf.reduce_sum(tf.square(p), 1) for p in parts]
            return tf.reduce_sum([whole, inside], 2)  # [2, groups]

        chunks = [chunk.numpy() for chunk in self._by_chunk(of_chunk)]
        energies = np.sum(chunks, 0, np.float64)
        return np.append(energies, energies.sum(1, keepdims=True), 1)


class SpectrumRecorder(GradientRecorder):
    """Writes the spectrum of the second moment of public gradients.

    The file is an `.npz` with `epochs`, `[recorded]`, and `eigenvalues`,
    `[recorded, eigenvalues]`: the largest ones of
    `(sum of g_i g_i^T) / m`, largest first.

    Formal guarantees: nothing private is read. Examples that are found in the
    private set raise: `PrivateSpectrumRecorder` is for these.

    Args: as `GradientRecorder`.
        eigenvalues: int, how many to write. Defaults to `500`.

    Reference:
        - [Zhou et al., 2021](https://arxiv.org/abs/2007.03813), Figure 1
    """

    def __init__(self, x, y, path, *, eigenvalues: int = 500, epochs=None):
        super().__init__(x, y, path, epochs=epochs)
        self._count = eigenvalues

    def _record(self, epoch):
        spectra = {e: v for e, v in self._recorded().items() if e < epoch}
        spectra[epoch] = self._eigenvalues()
        buffer = io.BytesIO()
        np.savez(
            buffer, epochs=list(spectra), eigenvalues=list(spectra.values())
        )
        self._replace(buffer.getvalue())

    def _recorded(self):
        if not self._path.exists():
            return {}
        with np.load(self._path) as file:
            return dict(zip(file["epochs"].tolist(), file["eigenvalues"]))

    def _eigenvalues(self):
        def of_chunk(gradients):
            return [
                tf.reshape(gradients.rows(v), [gradients.batch_size, -1])
                for v in gradients.variables
            ]

        gram = 0.0
        for parts in zip(*self._by_chunk(of_chunk)):
            rows = np.concatenate([part.numpy() for part in parts])
            for first in range(0, rows.shape[1], _COLUMNS):
                block = rows[:, first : first + _COLUMNS].astype(np.float64)
                gram = gram + block @ block.T  # [examples, examples]
        eigenvalues = np.linalg.eigvalsh(gram / len(gram))[::-1]
        # Rounding can make zero eigenvalues slightly negative.
        return np.maximum(eigenvalues[: self._count], 0.0)


class PrivateSpectrumRecorder(SpectrumRecorder):
    """Writes the spectrum of private gradients, for analysis only.

    Formal guarantees: none. What is written is computed from private data
    without noise, and no epsilon covers it. The privacy statement of the model
    says so.

    Args: as `SpectrumRecorder`.
    """

    _reads_private_gradients = True

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.model.current_run.leave_uncovered(
            f"the spectra of private gradients in {self._path.name}"
        )
