"""Metrics of private rows, released with noise and counted in the ledger."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src import backend
from keras.src.trainers import compile_utils
from scipy import stats

from tf_dpsub import accounting
from tf_dpsub.accounting.entry import VALIDATION
from tf_dpsub.checks import check_fraction, check_seed
from tf_dpsub.data import persons
from tf_dpsub.primitives import grid, noise
from tf_dpsub.training import (
    own_loss,
    requirements,
    step_errors,
    workers,
)
from tf_dpsub.training.carried_ledger import CarriedLedger
from tf_dpsub.training.per_example_loss import PerExampleLoss
from tf_dpsub.training.proved_features import ProvedFeatures

# The share of a contribution that is left for rounding: of sums in float64,
# and of the sum to the grid.
_MARGIN = 2.0**-20 + grid.MARGIN


class Estimate(NamedTuple):
    """A mean that was released with noise, and an interval that holds it.

    Attributes:
        value: float, without bias; noise may carry it out of the range of the
            metric.
        low: float, the lower end of the interval.
        high: float, its upper end.
    """

    value: float
    low: float
    high: float


class PrivateEvaluation:
    """Releases means of metrics over private rows, with noise.

    Each metric is clipped to `[0, bound]` and divided by its bound. A row
    contributes these k numbers, and a person the means over all rows of that
    person. Their sum gets Gaussian noise in each number, and is divided by the
    number of rows, or persons.

    Formal guarantees: what is released is one sum of k numbers. A row, or a
    person, contributes a vector in `[0, 1]^k`, whose norm is at most `sqrt(k)`:
    that is the sensitivity, rounding to the public grid included. The standard
    deviation of the noise is `noise_multiplier * sqrt(k)`, and the event one
    Gaussian without sampling. That the values of a row depend on this row alone
    is proved from the graph, else rows are evaluated one at a time. A value
    that is not finite counts as the worst one. The number of rows, or persons,
    is public, and so are names, bounds and noise.

    Args:
        model: `PrivateModel`.
        x: array, or structure of arrays, `[rows, ...]`, private inputs.
        y: the same for targets.
        metrics: dict of name and bound. `"loss"` is the compiled loss;
            others are names of Keras's metrics that are means over rows, such
            as `"accuracy"`.
        noise_multiplier: float, > 0.
        person_ids: int or string array `[rows]`. Defaults to `None`, each row
            is a unit of its own.
        seed: int, makes the noise reproducible, for experiments. Defaults to
            `None`, fresh entropy.
        secure_noise: bool, as for `tf_dpsub.optimizers.DPSGD`. Defaults to
            `False`.

    Attributes:
        names: tuple of strings, of the metrics.
        units: int, number of rows, or of persons.

    Raises:
        ValueError: if an argument is out of range or does not fit.
    """

    def __init__(
        self,
        model,
        x,
        y,
        *,
        metrics: Mapping[str, float],
        noise_multiplier: float,
        person_ids=None,
        seed: int | None = None,
        secure_noise: bool = False,
    ):
        check_metrics(metrics)
        check_noise(noise_multiplier)
        check_seed(seed)
        _require_one_worker(model)
        if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
            raise ValueError(
                "Expected arrays, of which each row is counted once, got "
                f"{type(x).__name__}. Pass `x` and `y` as arrays."
            )
        if y is None:
            raise ValueError("Expected targets `y` of the rows, got None.")
        self._data = tree.map_structure(np.asarray, model.preprocessed((x, y)))
        shapes = [part.shape for part in tree.flatten(self._data)]
        rows = {shape[0] if shape else 0 for shape in shapes}
        if len(rows) != 1 or 0 in rows:
            raise ValueError(
                "Expected arrays of inputs and targets with as many rows, at "
                f"least one, got shapes {', '.join(map(str, shapes))}."
            )
        (self._rows,) = rows
        self._persons = _numbered(person_ids, self._rows)
        self.units = self._rows
        if self._persons is not None:
            self.units = int(self._persons.max()) + 1
        self.names = tuple(metrics)
        self._bounds = np.array([float(metrics[n]) for n in self.names])
        self._model = model
        self._multiplier = float(noise_multiplier)
        self._noise = grid.GridNoise(
            self._multiplier,
            grid.spacing(self._multiplier, 1.0, len(self.names)),
        )
        self._seed, self._secure = seed, bool(secure_noise)
        self._key = noise.NoiseKey(seed)
        functions = [_function_of(model, n, self._data) for n in self.names]
        self._worst = [worst for _, worst in functions]
        self._values = ProvedFeatures(
            lambda data: _values_of_rows(
                model.model, [function for function, _ in functions], data
            ),
            model.model.variables,
            model.model.name,
        )

    def entry(self) -> accounting.LedgerEntry:
        """Describes one release, of values that were looked at before."""
        return accounting.LedgerEntry(
            mechanism=VALIDATION,
            noise_multiplier=self._multiplier,
            l2_norm_clip=math.sqrt(len(self.names)),
            batch_size=self.units,
            examples=self.units,
            sampler="batches",
            unit="example" if self._persons is None else "person",
            fixed_seed=self._seed is not None,
            notes=(
                *requirements.public_assumptions(self._model.model),
                *self._values.assumptions,
            ),
            uncovered=tuple(self._model._carried_ledger.uncovered()),
        )

    def require_rows_alone(self):
        """Raises unless a row has values of its own.

        Raises:
            ValueError: as `checked`.
        """
        next(self._in_chunks())

    def checked(self):
        """Computes what will be released, which nothing may leave.

        Returns:
            float64 array `[units, k]` in [0, 1].

        Raises:
            ValueError: if the model has no value for each row alone.
        """
        values = np.zeros((self._rows, len(self.names)))
        for positions, features in self._in_chunks():
            values[positions] = features[0]
        # A row that is not finite counts as badly as a row can.
        worst = self._worst * self._bounds
        values = np.where(np.isfinite(values), values, worst)
        values = np.clip(values, 0.0, self._bounds) / self._bounds
        if self._persons is None:
            return values
        sums = np.zeros((self.units, len(self.names)))
        np.add.at(sums, self._persons, values)
        counts = np.bincount(self._persons, minlength=self.units)
        # Rounding must not carry a mean over 1.
        return np.minimum(sums / counts[:, None], 1.0)

    def _in_chunks(self):
        try:
            yield from self._values.in_chunks(self._data)
        except tf.errors.InvalidArgumentError as error:
            raise step_errors.without_values(error) or error from None
        except ValueError as error:
            raise ValueError(
                "Expected metrics of a row that follow from this row and from "
                f"weights alone, got others of '{self._model.model.name}': "
                f"{error}"
            ) from error

    def released(self, values, confidence: float = 0.95) -> dict:
        """Releases the means of values once; charged elsewhere, before.

        Args:
            values: array that `checked` has returned.
            confidence: float in (0, 1), of the intervals. Defaults to `0.95`.

        Returns:
            dict of the names of the metrics, and an `Estimate` of each.
        """
        # In units of the sensitivity.
        scale = (1 - _MARGIN) / math.sqrt(len(self.names))
        (noisy,) = noise.noisy(
            self._key.advance(),
            [tf.constant(values.sum(0) * scale, tf.float64)],
            [self._noise],
            self._secure,
            "float64",
        )
        unit = self._bounds / (scale * self.units)
        means = noisy.numpy() * unit
        reach = stats.norm.isf((1 - confidence) / 2) * self._multiplier * unit
        return {
            name: Estimate(float(m), float(m - r), float(m + r))
            for name, m, r in zip(self.names, means, reach)
        }


class EvaluatedPrivately:
    """Gives a private model `evaluate_privately`."""

    ledger: accounting.PrivacyLedger
    current_run: object
    _carried_ledger: CarriedLedger

    def evaluate_privately(
        self,
        x,
        y,
        *,
        noise_multiplier: float,
        metrics: Mapping[str, float] | None = None,
        person_ids=None,
        confidence: float = 0.95,
        seed: int | None = None,
        secure_noise: bool = False,
    ) -> dict:
        """Estimates metrics on private rows with noise, and counts that.

        What is returned may be published, and decided by: it is one release,
        which the ledger records. The noise alone moves an accuracy by about
        `noise_multiplier / rows`.

        Formal guarantees: with k metrics, each clipped to `[0, bound]` and
        divided by its bound, the sum over rows moves by at most `sqrt(k)` with
        one row, or with all rows of one person where there are `person_ids`:
        a person counts by the means over that person's rows. Its noise has the
        standard deviation `noise_multiplier * sqrt(k)`, on a public grid. The
        event is one Gaussian without sampling. It composes with all others in
        the ledger, so the rows may be those of the training.

        Args:
            x: array, or structure of arrays, `[rows, ...]`, private inputs.
            y: the same for targets.
            noise_multiplier: float, > 0, standard deviation of the noise
                divided by the sensitivity.
            metrics: dict of name and bound: the values of a row are clipped to
                `[0, bound]`. `"loss"` is the compiled loss of a row, without
                `add_loss`; others are names of Keras's metrics that are means
                over rows. Defaults to `None`, `{"accuracy": 1.0}`.
            person_ids: int or string array `[rows]`, who each row is of.
                Defaults to `None`, each row is a unit of its own.
            confidence: float in (0, 1), with which an interval holds the mean
                over these rows. It knows nothing of other rows. Defaults to
                `0.95`.
            seed: int, makes the noise reproducible, for experiments. Defaults
                to `None`, fresh entropy.
            secure_noise: bool, as for `tf_dpsub.optimizers.DPSGD`. Defaults to
                `False`.

        Returns:
            dict of the names of the metrics, each with `value`, `low` and
            `high`, floats in the unit of the metric. A value may lie outside
            of `[0, bound]`: cutting it off would bias it.

        Raises:
            ValueError: if an argument is out of range or does not fit. Nothing
                is charged then.

        Example:

        ```python
        result = model.evaluate_privately(
            x_val, y_val, noise_multiplier=20.0,
            metrics={"accuracy": 1.0, "loss": 5.0},
        )
        result["accuracy"].value, result["accuracy"].low
        ```
        """
        check_fraction("confidence", confidence)
        if self.current_run is not None:
            raise ValueError(
                "Expected evaluate_privately outside of fit, got it in a "
                "callback: what a run releases is planned before it begins, so "
                "that budgets count it. Use callbacks.PrivateValidation."
            )
        self._carried_ledger.require_all_steps()
        evaluation = PrivateEvaluation(
            self,
            x,
            y,
            metrics={"accuracy": 1.0} if metrics is None else metrics,
            noise_multiplier=noise_multiplier,
            person_ids=person_ids,
            seed=seed,
            secure_noise=secure_noise,
        )
        self.ledger.require_unit(evaluation.entry().unit)
        values = evaluation.checked()
        self.ledger.charge(evaluation.entry(), 1, planned=1)
        self.ledger.settle()
        return evaluation.released(values, confidence)


def check_metrics(metrics):
    """Checks names of metrics and their bounds.

    Args:
        metrics: the argument.

    Raises:
        ValueError: if it is no dict of names and of finite bounds above 0.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise ValueError(
            "Expected metrics as a dict of names and bounds, such as "
            f"{{'accuracy': 1.0, 'loss': 5.0}}, got {metrics!r}."
        )
    for name, bound in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"Expected names of metrics, got {name!r}.")
        if not (isinstance(bound, (int, float)) and 0 < bound < math.inf):
            raise ValueError(
                f"Expected a finite bound > 0 for '{name}', got {bound!r}. "
                "Values of a row are clipped to it: without a bound no noise "
                "makes their sum private."
            )


def check_noise(noise_multiplier):
    """Checks the noise multiplier of a release, a finite number above 0."""
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(
            "Expected 0 < noise_multiplier < inf for private metrics, got "
            f"{noise_multiplier}. Metrics without noise are those of "
            "`evaluate`, which must not be published."
        )


def _numbered(person_ids, rows):
    """Numbers from 0 on for the persons, `[rows]`; None without persons."""
    if person_ids is None:
        return None
    ids = persons.checked_ids(person_ids)
    if ids.shape != (rows,):
        raise ValueError(
            f"Expected person_ids of shape ({rows},), got shape {ids.shape}. "
            "Pass one for each row."
        )
    return np.unique(ids, return_inverse=True)[1].reshape(-1)


def _require_one_worker(model):
    if workers.is_one_of_several(model.distribute_strategy):
        raise ValueError(
            "Expected one process for private metrics, got one of several "
            "workers: each would make a release of its own, of which the "
            "ledger counts one. Evaluate in one process."
        )


def _function_of(model, name, data) -> tuple[Callable, float]:
    """A metric of rows, and its worst value in units of the bound."""
    x, y = tree.map_structure(
        lambda a: keras.KerasTensor(
            (2, *a.shape[1:]),
            "string" if a.dtype.kind in "SUO" else a.dtype.name,
        ),
        data,
    )
    y_pred = model.model.compute_output_spec(x)
    if name == "loss":
        return _loss_of(model, y, y_pred), 1.0
    if tree.is_nested(y_pred) or tree.is_nested(y):
        raise ValueError(
            f"Expected a model of one output for the metric '{name}', got "
            "several outputs or targets. Pass metrics={'loss': bound}."
        )
    try:
        metric = compile_utils.get_metric(name, y, y_pred)
    except ValueError as error:
        raise ValueError(
            f"Expected the name of one of Keras's metrics, or 'loss', got "
            f"'{name}'."
        ) from error
    if not hasattr(metric, "_fn"):
        raise ValueError(
            f"Expected a metric that is a mean over rows, got '{name}': "
            f"{type(metric).__name__} compares rows with each other, and one "
            "row can move it far. Take 'accuracy' or 'loss'."
        )

    function = _PROVABLE.get(metric._fn, metric._fn)

    def values(y, y_pred):
        results = tf.convert_to_tensor(
            function(
                tf.cast(y, metric.dtype),
                tf.cast(y_pred, metric.dtype),
                **metric._fn_kwargs,
            )
        )
        return _means_of_rows(results, backend.get_keras_mask(y_pred))

    return values, 0.0 if metric._direction == "up" else 1.0


def _sparse_accuracy(y, y_pred):
    """1 where the largest output is that of the label."""
    if y.shape.rank == y_pred.shape.rank:
        y = tf.squeeze(y, -1)
    return tf.cast(tf.argmax(y_pred, -1) == tf.cast(y, tf.int64), tf.float32)


def _categorical_accuracy(y, y_pred):
    return tf.cast(tf.argmax(y_pred, -1) == tf.argmax(y, -1), tf.float32)


# Keras's own begin with a Bitcast, of which nothing is proved: rows would be
# evaluated one at a time.
_PROVABLE = {
    keras.metrics.sparse_categorical_accuracy: _sparse_accuracy,
    keras.metrics.categorical_accuracy: _categorical_accuracy,
}


def _loss_of(model, y, y_pred):
    if not model.compiled or model._compile_loss is None:
        raise ValueError(
            "Expected a compiled model with a loss for the metric 'loss', got "
            f"'{model.model.name}' without one. Call `compile`, or take "
            "another metric."
        )
    if own_loss.has_own_loss(model.model):
        raise ValueError(
            "Expected a loss of `compile` for the metric 'loss', got "
            f"'{model.model.name}', which overrides `compute_loss`. Take "
            "another metric."
        )
    per_example = PerExampleLoss(model._compile_loss)
    # Its variables must not be made within a graph.
    per_example.build(y, y_pred)
    return lambda y, y_pred: per_example(y, y_pred)[0]


def _means_of_rows(values, mask):
    """`[rows]` from values `[rows, ...]`, over what is not masked."""
    axes = list(range(1, values.shape.rank))
    if mask is None or mask.shape.rank != values.shape.rank:
        return tf.reduce_mean(values, axes)
    mask = tf.cast(mask, values.dtype)
    return tf.math.divide_no_nan(
        tf.reduce_sum(values * mask, axes), tf.reduce_sum(mask, axes)
    )


def _values_of_rows(model, functions, data):
    """Values `[rows, k]` of a chunk."""
    x, y = data
    mode = {"training": False} if model._call_has_training_arg else {}
    y_pred = model(x, **mode)
    return tf.stack(
        [tf.cast(f(y, y_pred), tf.float32) for f in functions], axis=1
    )
