"""Rows that belong to persons: identifiers, and a cap on rows of each."""

import dataclasses
import secrets

import numpy as np

from tf_dpsub.checks import check_count, check_seed

_CURE = (
    "Number the persons from 0, as by `numpy.unique(ids, return_inverse=True)"
    "[1]`, after leaving out rows whose person is not known."
)


@dataclasses.dataclass(frozen=True)
class PersonRows:
    """The rows of each person, one person after another.

    Formal guarantees: the order of the rows of a person is random, and
    independent of the rows of all others.

    Attributes:
        order: int64 array `[rows]`, numbers of rows, those of a person side by
            side.
        starts: int64 array `[persons]`, where those of a person begin in it.
        counts: int64 array `[persons]`, how many rows a person has, one at
            least.
    """

    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @property
    def persons(self) -> int:
        """Number of persons."""
        return len(self.counts)

    @classmethod
    def of(cls, person_ids, rows: int, seed: int | None = None):
        """Groups rows by their persons.

        Args:
            person_ids: array of ints or strings, `[rows]`: equal for rows of
                one person.
            rows: int, how many there have to be.
            seed: int or None, of the order. Defaults to `None`, fresh entropy.

        Raises:
            ValueError: as `limit_rows`, or if there are not so many.
        """
        ids = checked_ids(person_ids)
        if len(ids) != rows:
            raise ValueError(
                f"Expected person_ids to hold one id for each of {rows} rows, "
                f"got {len(ids)}. Select them as the rows were selected."
            )
        _, numbers, counts = np.unique(
            ids, return_inverse=True, return_counts=True
        )
        shuffled = _generator(seed).permutation(rows)
        order = shuffled[np.argsort(numbers[shuffled], kind="stable")]
        starts = np.cumsum(counts) - counts
        return cls(*(a.astype(np.int64) for a in (order, starts, counts)))


def limit_rows(person_ids, rows_per_person: int, seed: int | None = None):
    """Indices of rows of which no person has more than so many.

    Those that are kept of a person are drawn at random. Train on them alone,
    and ask `epsilon(delta, rows_per_person=...)` for the epsilon of a person.

    Formal guarantees: which rows of a person are kept depends on its own rows
    and on independent random numbers alone, so that a person who is missing
    changes nothing about the rows of others.

    Args:
        person_ids: array of ints or strings, `[rows]`: equal for rows of one
            person.
        rows_per_person: int, > 0.
        seed: int, of the draws. Defaults to `None`, fresh entropy.

    Returns:
        int64 array, indices in ascending order.

    Raises:
        ValueError: if ids are missing, are neither whole numbers nor strings,
            or are not in one row; or if `rows_per_person` is no positive int.

    Example:

    ```python
    kept = tf_dpsub.data.limit_rows(person_ids, 8)
    model.fit(x[kept], y[kept])
    model.epsilon(delta=1e-6, rows_per_person=8)
    ```
    """
    check_count("rows_per_person", rows_per_person)
    check_seed(seed)
    rows = PersonRows.of(person_ids, np.size(person_ids), seed)
    place = np.arange(len(rows.order)) - np.repeat(rows.starts, rows.counts)
    return np.sort(rows.order[place < rows_per_person])


def _generator(seed):
    # Never the global generator, which is seeded alike in many programs.
    return np.random.default_rng(
        secrets.randbits(128) if seed is None else seed
    )


def checked_ids(person_ids):
    """Ids as an array of whole numbers or strings, without missing ones."""
    ids = np.asarray(person_ids)
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(
            "Expected person_ids to be one id for each row, got shape "
            f"{list(ids.shape)}."
        )
    if ids.dtype == object:
        kinds = {type(value) for value in ids.tolist()}
        if kinds <= {str} or kinds <= {bytes} or kinds <= {int}:
            ids = np.array(ids.tolist())
    if ids.dtype.kind in "iu":
        is_missing = ids < 0
    elif ids.dtype.kind in "US":
        is_missing = ids == ids.dtype.type()
    else:
        raise ValueError(
            "Expected person_ids to be whole numbers or strings, got dtype "
            f"{ids.dtype}: fractions, flags and missing values name nobody. "
            + _CURE
        )
    if is_missing.any():
        raise ValueError(
            f"Expected an id for each row, got {int(is_missing.sum())} rows "
            "with a negative number or an empty string, which often stands for "
            "a missing one: rows without a person cannot be protected "
            "together. " + _CURE
        )
    return ids
