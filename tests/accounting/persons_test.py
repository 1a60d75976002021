"""The epsilon of a person with several rows, and entries that draw persons."""

import dataclasses
import math

import dp_accounting
import pytest

from tests.accounting.entries import (
    BATCHES,
    ONCE,
    PLAIN,
    POISSON,
    changed,
    ledger_of,
)
from tf_dpsub import accounting
from tf_dpsub.accounting import (
    LedgerEntry,
    PrivacyLedger,
    accountants,
    statement,
)
from tf_dpsub.accounting.statement import round_up

DELTA = 1e-5
STEPS = {"noise_multiplier": 4.0, "sampling_rate": 0.025, "delta": DELTA}
PERSONS = changed(POISSON, unit="person", examples=4000, batch_size=100)


class TestRowsPerPerson:
    # Computed by dp-accounting's own distributions.
    @pytest.mark.parametrize(
        "rows, expected",
        [(1, 0.8158), (2, 1.7525), (4, 3.8336), (8, 8.6886), (16, 20.9238)],
    )
    def test_epsilon(self, rows, expected):
        spent = accounting.epsilon(**STEPS, steps=1200, rows_per_person=rows)
        assert spent == pytest.approx(expected, abs=6e-5)

    def test_rdp_is_a_larger_bound(self):
        arguments = {**STEPS, "steps": 100, "rows_per_person": 3}
        rdp, pld = (
            accounting.epsilon(**arguments, accountant=accountant)
            for accountant in ("rdp", "pld")
        )
        assert pld < rdp < 1.2 * pld

    @pytest.mark.parametrize("rows", [1, 5])
    def test_without_sampling_all_rows_move_each_step(self, rows):
        found = accounting.epsilon(
            noise_multiplier=20.0,
            sampling_rate=1.0,
            steps=9,
            delta=DELTA,
            rows_per_person=rows,
        )
        alone = dp_accounting.get_epsilon_gaussian(20.0 / 3 / rows, DELTA)
        assert found == pytest.approx(alone)

    def test_delta_noise_and_steps_solve_for_it(self):
        rows = {
            "rows_per_person": 2,
            "sampling_rate": 0.025,
            "accountant": "rdp",
        }
        sigma = accounting.noise_multiplier(
            epsilon=2.0, delta=DELTA, steps=50, **rows
        )
        spent = accounting.epsilon(
            noise_multiplier=sigma, steps=50, delta=DELTA, **rows
        )
        assert 2 * (1 - 1e-4) < spent <= 2
        steps = accounting.steps(
            noise_multiplier=sigma, epsilon=2.0, delta=DELTA, **rows
        )
        assert 50 <= steps <= 51
        assert accounting.delta(
            noise_multiplier=sigma, steps=50, epsilon=spent, **rows
        ) == pytest.approx(DELTA, rel=1e-3)

    @pytest.mark.parametrize("rows", [0, -1, 1.5, None, True])
    def test_bad_number(self, rows):
        with pytest.raises(ValueError, match="rows_per_person >= 1"):
            accounting.epsilon(**STEPS, steps=10, rows_per_person=rows)

    def test_no_noise(self):
        spent = accounting.epsilon(
            noise_multiplier=2e-6,
            sampling_rate=0.1,
            steps=1,
            delta=DELTA,
            rows_per_person=3,
        )
        assert spent == math.inf


class TestLedger:
    @pytest.mark.parametrize("entry", [POISSON, BATCHES, ONCE])
    def test_composes_the_events_of_a_person(self, entry):
        ledger = ledger_of((entry, 40, 2))
        assert ledger.epsilon(DELTA, rows_per_person=1) == ledger.epsilon(DELTA)
        count = 2 if entry is ONCE else 40
        rate = entry.sampling_rate if entry is POISSON else 1.0
        assert ledger.epsilon(DELTA, rows_per_person=3) == accounting.epsilon(
            noise_multiplier=entry.noise_multiplier,
            sampling_rate=rate,
            steps=count,
            delta=DELTA,
            rows_per_person=3,
        )
        unamplified = accounting.epsilon(
            noise_multiplier=entry.noise_multiplier,
            sampling_rate=1.0,
            steps=40,
            delta=DELTA,
            rows_per_person=3,
        )
        assert (
            ledger.epsilon_without_amplification(DELTA, rows_per_person=3)
            == unamplified
        )

    def test_a_drawn_person_is_one_gaussian_however_many_rows(self):
        ledger = ledger_of((PERSONS, 40, 2))
        expected = accounting.epsilon(
            noise_multiplier=1.3, sampling_rate=0.025, steps=40, delta=DELTA
        )
        assert ledger.epsilon(DELTA) == expected
        assert ledger.epsilon(DELTA, rows_per_person=50) == expected
        assert ledger.unit == "person"

    def test_units_do_not_add_unless_rows_are_counted(self):
        ledger = ledger_of((PERSONS, 3), (POISSON, 3))
        for call in (ledger.epsilon, lambda d: statement(ledger, delta=d)):
            with pytest.raises(ValueError, match="Pass rows_per_person"):
                call(DELTA)
        both = ledger.epsilon(DELTA, rows_per_person=2)
        alone = ledger_of((POISSON, 3)).epsilon(DELTA, rows_per_person=2)
        assert alone < both < math.inf

    def test_not_private(self):
        ledger = ledger_of((PLAIN, 1))
        assert ledger.epsilon(DELTA, rows_per_person=2) == math.inf

    def test_fields_are_kept_and_left_out_where_they_say_nothing(self):
        rates = changed(POISSON, largest_rate=0.25)
        ledger = ledger_of((PERSONS, 3), (rates, 2), (POISSON, 1))
        text = ledger.to_json()
        assert PrivacyLedger.from_json(text).entries == ledger.entries
        assert text.count('"unit"') == text.count('"largest_rate"') == 1


class TestEntry:
    def test_largest_rate_is_that_of_the_event(self):
        entry = changed(POISSON, largest_rate=0.25, steps=7)
        expected = accounting.epsilon(
            noise_multiplier=1.3, sampling_rate=0.25, steps=7, delta=DELTA
        )
        ledger = ledger_of((entry.description, 7))
        assert ledger.epsilon(DELTA) == expected
        one, two = (
            ledger.epsilon(DELTA, "rdp", rows_per_person=rows)
            for rows in (1, 2)
        )
        assert two > 2 * one

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"unit": "persons"}, "Did you mean 'person'"),
            ({"unit": "person", "sampler": "batches"}, "persons are drawn"),
            ({"largest_rate": 0.0}, "0 < largest_rate <= 1"),
            ({"largest_rate": 1.5}, "0 < largest_rate <= 1"),
            ({"largest_rate": 0.1, "sampler": "batches"}, "largest_rate"),
        ],
    )
    def test_bad_fields(self, changes, message):
        fields = dataclasses.asdict(POISSON) | changes
        with pytest.raises(ValueError, match=message):
            LedgerEntry(**fields)


class TestStatement:
    def stated(self, entry, **arguments):
        entry = changed(entry, noise_multiplier=9.0)
        text = statement(ledger_of((entry, 3)), delta=DELTA, **arguments)
        assert max(map(len, text.splitlines())) <= 80
        return " ".join(text.split())

    def test_of_rows(self):
        text = self.stated(POISSON, rows_per_person=4)
        spent = accounting.epsilon(
            noise_multiplier=9.0,
            sampling_rate=150 / 60_000,
            steps=3,
            delta=DELTA,
            rows_per_person=4,
        )
        assert f"(ε = {round_up(spent)}," in text
        for part in (
            "is one person: at most 4 rows, together",
            "all rows of one person in one of them are replaced",
            "of adding or removing one person",
            "knows all persons but one",
            "The number of examples, the batch size",
        ):
            assert part in text
        assert "several units" not in text

    def test_of_persons(self):
        text = self.stated(PERSONS)
        for part in (
            "is one person: all rows with one id",
            "drew each of the 4000 persons independently with probability q = "
            "0.025",
            "The number of persons, the batch size",
            "of adding or removing one person",
        ):
            assert part in text
        assert "one row given to training" not in text

    def test_of_rates(self):
        text = self.stated(changed(POISSON, largest_rate=0.25))
        assert "independently, with probability 0.25 at most" in text
        assert "one row given to training" in text


class TestRowsOfAPersonInOtherEntries:
    """Several rows move what is released by several sensitivities at most."""

    def assert_gaussians(self, entry, multiplier, count):
        expected = dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(multiplier), count
        )
        assert accountants.composed_epsilon(
            [entry.event(rows_per_person=3)], delta=DELTA
        ) == accountants.composed_epsilon([expected], delta=DELTA)

    def test_epochs_of_random_steps(self):
        entry = changed(
            POISSON,
            sampler="allocation",
            each_example_once_per_epoch=True,
            epoch_steps=10,
            noise_multiplier=9.0,
            steps=20,
            epochs=2,
        )
        self.assert_gaussians(entry, 3.0, 2)
        alone = accountants.composed_epsilon([entry.event()], delta=DELTA)
        of_rows = accountants.composed_epsilon([entry.event(2)], delta=DELTA)
        assert of_rows > 2 * alone
        assert of_rows == accounting.epsilon(
            noise_multiplier=9.0,
            sampling_rate=0.1,
            steps=20,
            delta=DELTA,
            sampling="once_per_epoch",
            rows_per_person=2,
        )

    def test_bands(self):
        entry = changed(POISSON, noise_multiplier=9.0, bands=4, steps=9)
        self.assert_gaussians(entry, 3.0, 3)

    def test_a_person_who_is_drawn_counts_once(self):
        for change in (
            {"bands": 4, "steps": 9},
            {
                "sampler": "allocation",
                "each_example_once_per_epoch": True,
                "epoch_steps": 10,
                "steps": 10,
                "epochs": 1,
            },
        ):
            entry = changed(PERSONS, **change)
            assert entry.event(rows_per_person=3) == entry.event()

    def test_trials_of_a_search(self):
        trial = changed(POISSON, steps=10)
        entry = changed(POISSON, trial=(trial,), mean_trials=5.0, steps=1)
        one, two = (
            accountants.composed_epsilon([entry.event(rows)], delta=DELTA)
            for rows in (1, 2)
        )
        assert two > 2 * one
