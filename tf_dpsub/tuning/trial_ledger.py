"""The ledger of one trial, which keeps to what the search has recorded."""

import collections

from tf_dpsub import accounting


class BreaksGuaranteeError(ValueError):
    """Raised where a trial would do what its search has not recorded."""


class TrialLedger(accounting.PrivacyLedger):
    """Counts the releases of one trial, and refuses those beyond its plan.

    Formal guarantees: the search has recorded the plan before the first step of
    the trial. A charge that the plan does not cover raises, before what it
    stands for is released: a trial never releases more than was accounted for.
    What is compared are events: with bands, cycles, of which each begun one
    counts whole; where an epoch counts as one event, epochs.
    """

    def __init__(self):
        super().__init__()
        self._planned: collections.Counter | None = None
        self._stated: tuple[accounting.LedgerEntry, ...] = ()

    def plan(self, entries):
        """States all that the trial will release.

        Args:
            entries: sequence of `accounting.LedgerEntry` with counts.

        Raises:
            BreaksGuaranteeError: if it was stated before.
        """
        if self._planned is not None:
            raise BreaksGuaranteeError(
                "Expected one call of `fit` in a trial, got another one: the "
                "search has recorded what the first releases. Train for more "
                "epochs in one call."
            )
        self._planned = collections.Counter()
        for entry in entries:
            self._planned[_kind(entry)] += entry.step_events
        self._stated = tuple(entries)

    def charge(self, entry, steps=1, epochs=0, planned=None):
        """Counts steps, as `PrivacyLedger.charge`.

        Raises:
            BreaksGuaranteeError: if the plan does not cover them.
        """
        # What is refused stays counted: a copy would begin another cycle.
        super().charge(entry, steps, epochs, planned)
        self._require_planned(self.entries)

    def merge(self, other):
        """Takes over what another ledger has counted, as `PrivacyLedger.merge`.

        Raises:
            BreaksGuaranteeError: if the plan does not cover it.
        """
        after = accounting.PrivacyLedger.from_json(self.to_json())
        after.merge(other)
        self._require_planned(after.entries)
        super().merge(other)

    def _require_planned(self, entries):
        counts: collections.Counter = collections.Counter()
        for entry in entries:
            counts[_kind(entry)] += entry.step_events
        planned = self._planned or {}
        beyond = [k for k, count in counts.items() if count > planned.get(k, 0)]
        if beyond:
            raise BreaksGuaranteeError(
                "Expected a trial that releases what the search has recorded "
                f"when its training began, got more of {beyond[0][0]}. Train "
                "by one call of `fit` in `HyperModel.fit`, and score by "
                "`callbacks.PrivateValidation` or public data, not by "
                "`evaluate_privately`."
            )
        stated = {what for entry in self._stated for what in entry.uncovered}
        for entry in entries:
            more = [what for what in entry.uncovered if what not in stated]
            if more:
                raise BreaksGuaranteeError(
                    "Expected trials that the guarantee covers, got one with "
                    f"{more[0]}. Leave that out of the search."
                )


def _kind(entry):
    return entry.mechanism, entry.step_event(), entry.private_state
