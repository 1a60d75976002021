"""Callbacks whose metrics are released with noise, and what they will cost."""

import abc

import keras

from tf_dpsub.accounting import LedgerEntry


class ReleasedMetrics(keras.callbacks.Callback, abc.ABC):
    """Base of callbacks that put metrics with noise into the logs.

    Formal guarantees: each release is charged to the ledger of the model before
    it is made. Whatever decides by these metrics alone is post-processing.
    """

    @property
    @abc.abstractmethod
    def released_names(self) -> tuple[str, ...]:
        """Names in the logs of an epoch, all of them with noise."""

    @abc.abstractmethod
    def planned_entry(self, model, first_epoch: int, last_epoch: int):
        """Describes all releases of a run, before it begins.

        Args:
            model: `PrivateModel`.
            first_epoch: int, the epoch at which the run begins.
            last_epoch: int, the one at which it ends.

        Returns:
            `accounting.LedgerEntry`, whose steps are the planned releases.

        Raises:
            ValueError: if the callback and the run do not fit.
        """

    @abc.abstractmethod
    def charge_due(self, run, epoch: int):
        """Charges what is to be released at the end of an epoch.

        Called before any callback sees that end, whatever their order: a model
        that one of them saves has the release in its ledger.

        Args:
            run: `run.Run` in progress.
            epoch: int, as for `on_epoch_end`.
        """


def releasing_among(callbacks: list) -> list[ReleasedMetrics]:
    """Those callbacks that release metrics."""
    return [c for c in callbacks if isinstance(c, ReleasedMetrics)]


def planned_entries(
    model, callbacks: list, first_epoch: int, last_epoch: int, unit: str
) -> list[LedgerEntry]:
    """Describes what callbacks will release in a run, beside its steps.

    Args:
        model: `PrivateModel`.
        callbacks: list of `keras.callbacks.Callback`, all of the run.
        first_epoch: int, the epoch at which it begins.
        last_epoch: int, the one at which it ends.
        unit: string, what the steps of the run protect.

    Returns:
        List of `accounting.LedgerEntry` with counts.

    Raises:
        ValueError: if a callback and the run do not fit, if it protects
            something else, or if two callbacks release metrics of one name.
    """
    releasing = releasing_among(callbacks)
    names = [name for c in releasing for name in c.released_names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            "Expected one callback for each released metric, got two for "
            f"{', '.join(twice)}. Pass one of them alone."
        )
    planned = [
        c.planned_entry(model, first_epoch, last_epoch) for c in releasing
    ]
    for entry in planned:
        if entry.unit != unit:
            raise ValueError(
                f"Expected releases that protect one {unit}, as the steps do, "
                f"got {entry.mechanism} with one {entry.unit}: no epsilon "
                "covers both. Give person_ids to both, or to neither."
            )
    return planned
