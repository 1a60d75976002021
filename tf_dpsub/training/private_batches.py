"""Batches that private steps take, made of what `fit` is given."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import tree
from keras.src.trainers.data_adapters import array_slicing

from tf_dpsub import accounting
from tf_dpsub.checks import check_choice, check_count
from tf_dpsub.data import (
    given_batches,
    once_per_epoch,
    person_batches,
    poisson_batches,
)
from tf_dpsub.primitives import clipping
from tf_dpsub.training import banded_runs, kept_features, microbatches
from tf_dpsub.training.views import Views

# Figures of a warning are for this one.
_DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class PrivateBatches:
    """The batches of one run, padded to whole microbatches.

    Attributes:
        dataset: `tf.data.Dataset`, or a distributed one, of dicts of `x`, `y`,
            `w` (sample weights) where there are any, and `real`.
        poisson: `data.PoissonBatches` that draws them; None where the user
            gives them.
        steps_per_epoch: int, None if not known.
        steps_to_take: int, how many of the dataset's batches Keras takes for an
            epoch; None, all that there are.
        views: int, of each example, or rows that a step takes of each person.
            With more than one, parts of a batch have an axis of them behind
            that of the batch.
        each_example_once_per_epoch: bool, whether the user states it.
        raw_inputs: structure of arrays, the inputs before features were made
            of them; None where the batches hold inputs.
    """

    dataset: tf.data.Dataset
    poisson: poisson_batches.PoissonBatches | None
    steps_per_epoch: int | None
    steps_to_take: int | None
    views: int = 1
    each_example_once_per_epoch: bool = False
    raw_inputs: object = None

    @classmethod
    def of(
        cls,
        model,
        x,
        y=None,
        sample_weight=None,
        *,
        steps_per_epoch: int | None = None,
        epochs: int = 1,
        initial_epoch: int = 0,
        views: int = 1,
        each_example_once_per_epoch: bool = False,
        keep_features: bool = False,
        person_ids=None,
        rows_per_person_per_step: int | None = None,
        sampling: str | None = None,
    ):
        """Makes the batches of a call of `fit`.

        Args:
            model: compiled `PrivateModel`, whose `kept_features` it sets.
            x, y, sample_weight, steps_per_epoch, views,
                each_example_once_per_epoch, keep_features, person_ids,
                rows_per_person_per_step, sampling: as for
                `PrivateModel.fit`.
            epochs: int, the epoch at which the run ends. Defaults to `1`.
            initial_epoch: int, the one at which it begins. Defaults to `0`.

        Returns:
            A `PrivateBatches`.

        Raises:
            ValueError: if the data or a statement about them do not fit.
        """
        _check_sampling(sampling, x)
        poisson, raw_inputs = _poisson(
            model, x, y, sample_weight, views, keep_features, sampling
        )
        if each_example_once_per_epoch:
            _check_epochs(poisson, x, steps_per_epoch)
        if person_ids is not None:
            poisson = person_batches.of_persons(
                poisson, person_ids, rows_per_person_per_step or 1
            )
            views = poisson.rows_per_step
        poisson = banded_runs.in_groups(
            model.optimizer, poisson, steps_per_epoch, epochs
        )
        _check_whole_epochs(poisson, steps_per_epoch)
        if poisson is not None:
            batches = cls.drawn(model, poisson, steps_per_epoch, views)
            if model.kept_features is None:
                return batches
            return dataclasses.replace(batches, raw_inputs=raw_inputs)
        batches = cls.given(model, x, steps_per_epoch, views)
        if each_example_once_per_epoch:
            return dataclasses.replace(
                batches, each_example_once_per_epoch=True
            )
        steps = (batches.steps_per_epoch or 0) * (epochs - initial_epoch)
        _warn_of_cost(x, model.optimizer, steps)
        return batches

    @classmethod
    def drawn(
        cls,
        model,
        poisson,
        steps_per_epoch: int | None = None,
        views: int = 1,
    ):
        """Batches that `data.PoissonBatches` draws: of each replica its own.

        Raises:
            ValueError: if rates of rows make batches too large for the
                `batch_size`.
        """
        if poisson.largest_rate is not None:
            _check_size(model, poisson)
        steps = steps_per_epoch or poisson.steps_per_epoch
        model._places = microbatches.places_of(poisson.row_spec["x"])
        dataset = _distributed(model, poisson, views)
        return cls(dataset, poisson, steps, steps, views)

    @classmethod
    def given(
        cls,
        model,
        dataset,
        steps_per_epoch: int | None = None,
        views: int = 1,
    ):
        """Batches of a `tf.data.Dataset`, as they come."""
        dataset = model.preprocessed(dataset)
        size = model.microbatch_size_of(views)
        microbatches.spec_of(dataset.element_spec, size)
        layout = Views.of_run(views)
        dataset = dataset.map(
            lambda *data: layout.with_axis(
                padded(
                    model,
                    keras.utils.unpack_x_y_sample_weight(
                        data[0] if len(data) == 1 else data
                    ),
                    views,
                )
            )
        )
        steps = steps_per_epoch or _cardinality(dataset)
        return cls(dataset, None, steps, steps_per_epoch, views)

    @property
    def spec(self):
        """Structure of `tf.TensorSpec` of a batch on one replica."""
        return tree.map_structure(
            lambda s: getattr(s, "_value_specs", [s])[0],
            self.dataset.element_spec,
        )

    @property
    def inputs(self):
        """All private inputs as `overlap.count_common` takes them, or None."""
        if self.raw_inputs is not None:
            return self.raw_inputs
        return None if self.poisson is None else self.poisson.comparable_inputs

    @property
    def views_may_differ(self):
        """Whether they do before random layers of the model see them."""
        return self.poisson is not None and (
            self.poisson.map_may_draw or self.poisson.unit == "person"
        )


def padded(model, data: tuple, views: int = 1) -> dict:
    """A batch of the user's, padded to whole microbatches.

    Args:
        model: compiled `PrivateModel`.
        data: tuple of `x`, and perhaps `y` and sample weights.
        views: int, of each example. Defaults to `1`.

    Returns:
        dict of structures of tensors, without an axis of views.
    """
    model._places = microbatches.places_of(
        tree.map_structure(
            lambda t: tf.TensorSpec(t.shape[1:], t.dtype), data[0]
        )
    )
    size = model.microbatch_size_of(views)
    return given_batches.padded(
        given_batches.named(*data),
        size,
        # Rounding is not bounded in larger ones: what clipping keeps for it
        # follows the batch size of the optimizer.
        most=clipping.largest_batch(model.optimizer.batch_size),
    )


def checked_batch_size(optimizer, batch_size: int | None) -> int:
    """The batch size of the optimizer, which any other must equal.

    Args:
        optimizer: private optimizer.
        batch_size: int, or None.

    Raises:
        ValueError: if it is another one.
    """
    expected = optimizer.batch_size
    if batch_size not in (None, expected):
        raise ValueError(
            f"Expected batch_size={expected}, that of the optimizer, which its "
            f"noise is calibrated for, got {batch_size}. Leave it out, or "
            "give both the same."
        )
    return expected


def check_persons(
    person_ids, rows_per_step: int | None, x, views: int, split: float
):
    """Refuses what contradicts a statement about whose the rows are.

    Args:
        person_ids, rows_per_step, x, views: as for `PrivateModel.fit`.
        split: float, the share of rows for validation.

    Raises:
        ValueError: if something does.
    """
    check_count("rows_per_person_per_step", rows_per_step, optional=True)
    if person_ids is None:
        if rows_per_step is not None:
            raise ValueError(
                "Expected person_ids with rows_per_person_per_step="
                f"{rows_per_step}, got none. Pass the id of each row's person."
            )
        return
    if isinstance(x, tf.data.Dataset):
        raise ValueError(
            "Expected arrays or PoissonBatches with person_ids, got a "
            "tf.data.Dataset of batches, of which no person can be drawn. Pass "
            "arrays, or `PoissonBatches(rows, map=...)`."
        )
    if views > 1:
        raise ValueError(
            f"Expected views=1 with person_ids, got {views}: the rows of a "
            "person are averaged as views are. Augment each of them by the "
            "`map` of `PoissonBatches`, or take more of them by "
            "rows_per_person_per_step."
        )
    if split:
        raise ValueError(
            f"Expected validation_split=0 with person_ids, got {split}: rows "
            "of one person would be on both sides. Set whole persons apart, "
            "and pass them as validation_data."
        )


def split_validation(data, validation_data, split: float, is_public: bool):
    """Takes validation data from the private ones, if none are given.

    Args:
        data: tuple of arrays `x`, `y` and sample weights.
        validation_data: as `keras.Model.fit` takes it.
        split: float, the share to take.
        is_public: bool, whether the user states that they are public.

    Returns:
        What is left of `data`, and the validation data; None without any.

    Raises:
        ValueError: if private data would be taken for public ones.
    """
    if not split or validation_data is not None:
        return data, validation_data
    if is_public:
        raise ValueError(
            "Expected validation_data with "
            "validation_data_is_public=True, got validation_split: "
            "what is split off is private. Pass public data."
        )
    return array_slicing.train_validation_split(data, validation_split=split)


# By the argument `sampling` of `fit`.
_SAMPLERS = {
    sampler.sampling: sampler
    for sampler in (
        poisson_batches.PoissonBatches,
        once_per_epoch.OncePerEpoch,
    )
}


def _check_sampling(sampling, x):
    """Refuses a way of sampling that is not that of the data."""
    if sampling is None:
        return
    check_choice("sampling", sampling, tuple(_SAMPLERS))
    if isinstance(x, tf.data.Dataset):
        raise ValueError(
            f"Expected arrays with sampling={sampling!r}, got a "
            "tf.data.Dataset of batches, which are taken as they come. Pass "
            "the arrays, or rows that can be read by index: "
            f"`tf_dpsub.data.{_SAMPLERS[sampling].__name__}(rows, ...)`."
        )
    if isinstance(x, poisson_batches.PoissonBatches):
        if x.sampling != sampling:
            raise ValueError(
                f"Expected sampling={x.sampling!r}, that of the given "
                f"{type(x).__name__}, got {sampling!r}. Leave it out, or give "
                f"`tf_dpsub.data.{_SAMPLERS[sampling].__name__}`."
            )


def _check_whole_epochs(poisson, steps_per_epoch):
    """Refuses an epoch that is not the one in which each example is drawn."""
    if poisson is None or poisson.sampling != "once_per_epoch":
        return
    if steps_per_epoch not in (None, poisson.steps_per_epoch):
        raise ValueError(
            f"Expected steps_per_epoch={poisson.steps_per_epoch}, "
            "ceil(examples / batch_size), in which each example is drawn once, "
            f"got {steps_per_epoch}. Leave it out."
        )


def _poisson(model, x, y, sample_weight, views, keep_features, sampling):
    """Batches that are drawn, and inputs that features may stand for in them.

    Both are None for a dataset of given batches.
    """
    has_targets = y is not None or sample_weight is not None
    if isinstance(x, tf.data.Dataset):
        if has_targets:
            raise ValueError(
                "Expected y=None and sample_weight=None with a "
                "tf.data.Dataset, got targets or weights beside it. Let "
                "the dataset give (x, y) or (x, y, sample_weight)."
            )
        return None, None
    if isinstance(x, poisson_batches.PoissonBatches):
        if has_targets:
            raise ValueError(
                "Expected y=None and sample_weight=None with PoissonBatches, "
                "got targets or weights beside them. Make them of all: "
                "`PoissonBatches(x, y, sample_weight, batch_size=...)`."
            )
        checked_batch_size(model.optimizer, x.batch_size)
        if not keep_features:
            return x, None
        return kept_features.of_batches(model, x, views), x.inputs
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
        model.preprocessed((x, y, sample_weight))
    )
    features = kept_features.of_arrays(model, x) if keep_features else None
    poisson = _SAMPLERS[sampling or "poisson"](
        x if features is None else features,
        y,
        sample_weight,
        batch_size=model.optimizer.batch_size,
        seed=_sampling_seed(model),
    )
    if keep_features and features is None:
        poisson = kept_features.of_batches(model, poisson, views)
    return poisson, x


def _sampling_seed(model):
    """A fixed seed gives each run batches of its own."""
    if model.optimizer.seed is None:
        return None
    entropy = [model.optimizer.seed, model.ledger.steps]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _distributed(model, poisson, views):
    """A dataset of Poisson batches: one of its own for each replica."""
    strategy = model.distribute_strategy
    multiple = model.microbatch_size_of(views)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return poisson.dataset(multiple_of=multiple, views=views)

    def shards_of(context):
        count = replicas // context.num_input_pipelines
        host = context.input_pipeline_id
        if poisson.is_part:
            # Each replica has a part of the examples of its host.
            places = [((r, count), host) for r in range(count)]
        else:
            places = [((host * count + r, replicas), 0) for r in range(count)]
        shards = [
            poisson.dataset(
                multiple_of=multiple, shard=shard, views=views, host=of_host
            )
            for shard, of_host in places
        ]
        # The replicas of a worker take elements in turn.
        choice = tf.data.Dataset.range(count).repeat()
        return tf.data.Dataset.choose_from_datasets(shards, choice)

    return strategy.distribute_datasets_from_function(shards_of)


def _check_size(model, poisson):
    """Refuses rates by which batches exceed what clipping leaves room for."""
    batch_size = model.optimizer.batch_size
    draw = clipping.largest_draw(poisson.expected_size)
    if draw > clipping.largest_batch(batch_size):
        raise ValueError(
            "Expected sampling_rates whose sum is about batch_size="
            f"{batch_size}, got a larger one, which is private if the rates "
            "are. Clipping leaves room for rounding in sums of about as many "
            "examples as the optimizer's batch_size: divide the rates by a "
            "public number, or raise the batch_size."
        )


def _check_epochs(poisson, dataset, steps_per_epoch):
    """Refuses a statement about epochs that cannot be true."""
    if poisson is not None:
        raise ValueError(
            "Expected each_example_once_per_epoch=False, which is for batches "
            "of a tf.data.Dataset, got True with examples that `fit` draws. "
            "Leave it out; sampling='once_per_epoch' draws each of them once "
            "in an epoch."
        )
    steps = _cardinality(dataset)
    if steps is None or (steps_per_epoch or 0) > steps:
        raise ValueError(
            "Expected a tf.data.Dataset of known length, and epochs no longer "
            "than it, with each_example_once_per_epoch=True, got "
            f"{'unknown or infinite' if steps is None else steps} batches and "
            f"steps_per_epoch={steps_per_epoch}. Do not repeat the dataset, or "
            "state its length with `tf.data.experimental.assert_cardinality`."
        )


def _cardinality(dataset):
    """Number of batches of a dataset, or None."""
    cardinality = int(dataset.cardinality())
    return cardinality if cardinality >= 0 else None


def _warn_of_cost(dataset, optimizer, steps: int):
    """Warns of the cost of batches that `PoissonBatches` did not draw.

    Args:
        dataset: `tf.data.Dataset` of batches.
        optimizer: private optimizer.
        steps: int, planned; 0 if not known.
    """
    sizes = {spec.shape[0] for spec in tree.flatten(dataset.element_spec)}
    sizes -= {None, optimizer.batch_size}
    also = ""
    if sizes:
        also = (
            f" Its batches have {min(sizes)} examples, and sums are divided by "
            f"batch_size={optimizer.batch_size}."
        )
    batches = _cardinality(dataset)
    noise_multiplier = (
        optimizer.effective_noise_multiplier if optimizer.is_calibrated else 0
    )
    if batches and steps > 0 and 0 < noise_multiplier < math.inf:
        # Its last batch may be smaller.
        examples = batches * min(sizes, default=optimizer.batch_size)
        given, drawn = (
            accounting.epsilon(
                noise_multiplier=noise_multiplier,
                sampling_rate=rate,
                steps=steps,
                delta=_DELTA,
            )
            for rate in (1.0, min(1.0, optimizer.batch_size / examples))
        )
        if given == drawn and not also:
            # Each step takes all examples.
            return
        cost = (
            f"these {steps} steps cost epsilon = {given:.3g} at delta = "
            f"{_DELTA:.0e}, and {drawn:.3g} if each step drew its batch from "
            f"the about {examples:,} examples"
        )
    else:
        cost = "epsilon is much larger than if each step drew its batch"
    logging.warning(
        "Batches of a dataset are accounted for without amplification by "
        "sampling: %s. `fit` draws from arrays, and from "
        "`tf_dpsub.data.PoissonBatches(rows, map=...)`, whose `map` decodes "
        "and augments each row anew.%s",
        cost,
        also,
    )
