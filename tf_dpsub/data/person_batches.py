"""Batches in which every person is drawn independently, with some rows."""

import numpy as np
import tensorflow as tf

from tf_dpsub.checks import check_count
from tf_dpsub.data.once_per_epoch import OncePerEpoch
from tf_dpsub.data.persons import PersonRows
from tf_dpsub.data.poisson_batches import (
    PoissonBatches,
    step_key,
    with_views,
)


class PersonBatches(PoissonBatches):
    """Draws every person independently, and some rows of each.

    The batches are those of `PoissonBatches`, with persons for examples: all
    parts but `"real"` have an axis of rows behind that of the batch, if there
    are several. A step takes `rows_per_step` rows of a drawn person, which
    follow each other on a circle of all its rows, in an order that is drawn
    once, from a place on it that is drawn anew each time. Who has fewer rows
    gives all; in the others, which repeat them, the part `"rows"` (float32,
    `[persons, rows_per_step]`) is 0.

    Formal guarantees: this is Poisson sampling of persons with rate
    `q = batch_size / persons`. Which rows a person gives depends on its own
    rows and on independent random numbers alone: a person who is missing
    changes nothing about the others. The number of persons is public.

    Args:
        batches: `PoissonBatches` of rows, which it takes over.
        person_ids: array of ints or strings, `[rows]`: equal for rows of one
            person.
        rows_per_step: int, > 0.

    Attributes:
        person_ids: array, as given.
        rows_per_step: int, as given.
        unit: string, `"person"`.
        examples, batch_size, sampling_rate, steps_per_epoch: as of
            `PoissonBatches`, of persons.

    Raises:
        ValueError: if there is not an id for each row, if ids are missing or
            of another kind, if the batch size is above the number of persons,
            if the rows have rates of their own, if other hosts hold further
            rows, or if `rows_per_step` is no
            positive int.
    """

    unit = property(lambda self: "person")

    def __init__(self, batches: PoissonBatches, person_ids, rows_per_step: int):
        check_count("rows_per_person_per_step", rows_per_step)
        if batches.largest_rate is not None:
            raise ValueError(
                "Expected person_ids or sampling_rates, got both: persons are "
                "drawn alike. Leave one of them out."
            )
        if batches.is_part:
            raise ValueError(
                "Expected person_ids or total_examples, got both: a person may "
                "have rows at several hosts. Give all rows to every host."
            )
        persons = PersonRows.of(person_ids, batches.examples, batches.seed)
        # Draws, rows and `map` are those of the batches.
        vars(self).update(vars(batches))
        self.person_ids = np.asarray(person_ids)
        self.rows_per_step = int(rows_per_step)
        self.assumptions = (
            *batches.assumptions,
            f"that a step takes at most {rows_per_step} rows of a person",
        )
        self._set_size(persons.persons, batches.batch_size)
        self._own_examples = persons.persons
        with tf.device("CPU"):
            self._order = tf.constant(persons.order)
            self._starts = tf.constant(persons.starts)
            self._counts = tf.constant(persons.counts)

    def _drawn_parts(self, gather, indices, key, views):
        key = step_key(*key)
        drawn, rows = tf.size(indices), self.rows_per_step
        counts = tf.gather(self._counts, indices)[:, None]
        seed = key + tf.constant([0, -1], tf.int64)
        uniform = tf.random.stateless_uniform(
            [drawn, 1], seed, dtype=tf.float64
        )
        first = tf.cast(uniform * tf.cast(counts, tf.float64), tf.int64)
        place = tf.range(rows, dtype=tf.int64)
        chosen = tf.gather(
            self._order,
            tf.gather(self._starts, indices)[:, None]
            + (first + place) % counts,
        )  # [drawn, rows]
        parts = self._parts_of_rows(gather, tf.reshape(chosen, [-1]), key)
        if rows == 1:
            return parts
        given = tf.cast(place < counts, tf.float32)
        return with_views(parts, drawn, rows) | {"rows": given}

    def _parts_of_rows(self, gather, rows, key):
        if self.holds_arrays:
            parts = gather(rows)
        else:
            # Sources are asked for ascending, distinct numbers.
            distinct, _ = tf.unique(tf.sort(rows))
            places = tf.searchsorted(distinct, rows)
            parts = tf.nest.map_structure(
                lambda part: tf.gather(part, places), gather(distinct)
            )
        if self._map is not None:
            parts = self._map(parts, rows, key)
        return parts

    @property
    def _draws_of_rows(self) -> bool:
        return True


class PersonsOncePerEpoch(PersonBatches, OncePerEpoch):
    """Draws every person once in an epoch, with some rows of each.

    As `PersonBatches`, but persons are drawn as `OncePerEpoch` draws examples.
    """


def of_persons(batches: PoissonBatches, person_ids, rows_per_step: int):
    """Batches of persons, drawn as those of rows are.

    Args: as `PersonBatches`.

    Returns:
        A `PersonBatches`.

    Raises: as `PersonBatches`.
    """
    once = isinstance(batches, OncePerEpoch)
    return (PersonsOncePerEpoch if once else PersonBatches)(
        batches, person_ids, rows_per_step
    )
