"""What a private model says of the privacy that it has spent."""

import keras
from absl import logging

from tf_dpsub import accounting
from tf_dpsub.training.carried_ledger import CarriedLedger


class ReportsPrivacy:
    """Gives a private model `epsilon` and `privacy_statement`."""

    model: keras.Model
    ledger: accounting.PrivacyLedger
    current_run: object
    _carried_ledger: CarriedLedger

    def epsilon(
        self,
        delta: float,
        accountant: str = "pld",
        rows_per_person: int | None = None,
    ) -> float:
        """Epsilon spent so far.

        Args:
            delta: float, in (0, 1).
            accountant: string, `"pld"`, the smaller bound, or `"rdp"`, the
                cheaper one. Defaults to `"pld"`.
            rows_per_person: int, the most rows of one person, for the epsilon
                of all of them together; see `data.limit_rows`. Defaults to
                `None`, that of one row, or of one id of `person_ids`.

        Returns:
            float, `inf` if a step was not private.

        Raises:
            ValueError: if the optimizer has taken steps that were not counted,
                or an argument is out of its range.
        """
        self._carried_ledger.require_all_steps()
        if self.current_run is None and self._carried_ledger.is_newly_changed():
            logging.warning(
                "The weights were changed after the last private step, outside "
                "of private training: epsilon does not cover that."
            )
        return self.ledger.epsilon(delta, accountant, rows_per_person)

    def privacy_statement(
        self, delta, accountant="pld", rows_per_person: int | None = None
    ) -> str:
        """Statement of what was spent, and on which assumptions.

        Args: as `epsilon`.

        Returns:
            string of several lines.

        Raises: as `epsilon`.
        """
        self._carried_ledger.require_all_steps()
        return accounting.statement(
            self.ledger,
            delta=delta,
            accountant=accountant,
            model_name=self.model.name,
            weights_were_changed=self._carried_ledger.is_changed(),
            uncovered=self._carried_ledger.uncovered_before(),
            rows_per_person=rows_per_person,
        )
