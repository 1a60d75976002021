import copy
import itertools
import json
import math
import os
import pickle

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
from tf_dpsub.accounting import PrivacyLedger

DELTA = 1e-5


def reloaded(ledger):
    return PrivacyLedger.from_json(ledger.to_json())


def edited(ledger, **changes):
    """The ledger with other fields of its first entry, and a valid digest."""
    content = json.loads(ledger.to_json())
    content["entries"][0].update(changes)
    del content["sha256"]
    return PrivacyLedger.from_json(json.dumps(content))


def counts(ledger):
    return [(entry.steps, entry.epochs) for entry in ledger.entries]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "ledger.json"


@pytest.fixture
def writes(monkeypatch):
    """Number of times that a file has replaced another."""
    replace, calls = os.replace, []

    def counted(*arguments):
        calls.append(arguments)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", counted)
    return calls


class TestCounting:
    def test_equal_steps_extend_an_entry(self):
        ledger = PrivacyLedger()
        ledger.charge(POISSON)
        ledger.charge(changed(POISSON), 4, 1)
        assert ledger.entries == (changed(POISSON, steps=5, epochs=1),)
        assert ledger.steps == 5

    @pytest.mark.parametrize(
        "change",
        [
            {"mechanism": "GEP"},
            {"noise_multiplier": 1.2},
            {"l2_norm_clip": 2.0},
            {"batch_size": 151},
            {"examples": 60001},
            {"sampler": "batches"},
            {"fixed_seed": True},
            {"private_selection": True},
            {"private_state": True},
            {"notes": ("the state of a layer",)},
            {"uncovered": ("some examples",)},
        ],
    )
    def test_other_steps_append_an_entry(self, change):
        other = changed(POISSON, **change)
        ledger = ledger_of((POISSON, 2), (other, 3), (POISSON, 4))
        assert ledger.entries == (
            changed(POISSON, steps=2),
            changed(other, steps=3),
            changed(POISSON, steps=4),
        )

    @pytest.mark.parametrize("by", ["rdp", "pld"])
    def test_epsilon_composes_all_entries(self, by):
        run = {"noise_multiplier": 1.3, "sampling_rate": 150 / 60000}
        ledger = ledger_of((POISSON, 4000), (BATCHES, 3), (POISSON, 2000))
        alone = accounting.epsilon(
            **run, steps=6000, delta=DELTA, accountant=by
        )
        assert ledger_of((POISSON, 6000)).epsilon(DELTA, by) == alone
        composed = dp_accounting.ComposedDpEvent(
            [
                changed(POISSON, steps=6000).event(),
                changed(BATCHES, steps=3).event(),
            ]
        )
        expected = accounting.accountants.composed_epsilon(
            [composed], delta=DELTA, accountant=by
        )
        assert ledger.epsilon(DELTA, by) == pytest.approx(expected, rel=1e-9)
        assert expected > alone
        assert ledger.delta(expected, by) == pytest.approx(DELTA, rel=1e-4)

    def test_epsilon_of_nothing(self):
        assert PrivacyLedger().epsilon(DELTA) == 0
        assert PrivacyLedger().epsilon_without_amplification(DELTA) == 0
        assert PrivacyLedger().entries == ()

    def test_one_step_without_noise_spoils_all(self):
        ledger = ledger_of((POISSON, 3), (PLAIN, 1), (POISSON, 3))
        assert ledger.epsilon(DELTA) == math.inf
        assert ledger.epsilon_without_amplification(DELTA) == math.inf

    @pytest.mark.parametrize("by", ["rdp", "pld"])
    def test_one_step_with_private_state_spoils_all(self, by):
        private = changed(POISSON, private_state=True)
        ledger = ledger_of((POISSON, 3), (private, 1), (POISSON, 3))
        assert ledger.epsilon(DELTA, by) == math.inf
        assert ledger.epsilon_without_amplification(DELTA, by) == math.inf

    def test_batches_by_epoch_and_by_step(self):
        # PRIVACY section 3: 9.5 and 1.15.
        ledger = ledger_of(*[(ONCE, 40, 1)] * 30)
        assert ledger.epsilon(DELTA, "pld") == pytest.approx(1.1496, abs=1e-4)
        assert ledger.epsilon_without_amplification(
            DELTA, "pld"
        ) == pytest.approx(9.5354, abs=1e-4)

    def test_poisson_without_amplification(self):
        ledger = ledger_of((changed(POISSON, noise_multiplier=18.0), 1200))
        assert ledger.epsilon(DELTA) < 0.2
        assert ledger.epsilon_without_amplification(DELTA) == pytest.approx(
            9.5354, abs=1e-4
        )

    def test_steps_outside_epochs_count_one_by_one(self):
        ledger = ledger_of((ONCE, 50), (ONCE, 40, 1), (ONCE, 40), (ONCE, 0, 1))
        assert counts(ledger) == [(50, 0), (80, 2)]
        by_step = ledger_of((BATCHES, 52))
        assert ledger.epsilon(DELTA) == by_step.epsilon(DELTA)

    @pytest.mark.parametrize(
        "entry, steps, epochs, error, message",
        [
            (POISSON, -1, 0, ValueError, "A ledger only grows"),
            (POISSON, 1, -1, ValueError, "A ledger only grows"),
            (POISSON, 1.5, 0, TypeError, "as an integer"),
            (changed(POISSON, steps=3), 1, 0, ValueError, "without counts"),
        ],
    )
    def test_invalid_charge(self, entry, steps, epochs, error, message):
        ledger = ledger_of((POISSON, 7))
        with pytest.raises(error, match=message):
            ledger.charge(entry, steps, epochs)
        assert ledger.steps == 7


class TestPlanning:
    @pytest.mark.parametrize("entry", [POISSON, BATCHES, ONCE])
    def test_last_step_within_a_budget(self, entry):
        ledger = ledger_of((POISSON, 100), (BATCHES, 2))
        fit = ledger.steps_within(entry, epsilon=1.0, delta=DELTA)
        assert fit > 0
        for count, further in ((fit, True), (fit + 1, False)):
            # Of batches that hold each example once, epochs are counted.
            charge = (10 * count, count) if entry is ONCE else (count, 0)
            planned = ledger.epsilon_after(
                entry, charge[0], DELTA, epochs=charge[1]
            )
            spent = reloaded(ledger)
            spent.charge(entry, *charge)
            assert planned == spent.epsilon(DELTA)
            assert (planned <= 1.0) == further
        assert ledger.steps == 102

    def test_nothing_fits_without_noise(self):
        ledger = PrivacyLedger()
        assert ledger.steps_within(PLAIN, epsilon=1e6, delta=DELTA) == 0

    def test_nothing_fits_with_private_state(self):
        private = changed(POISSON, private_state=True)
        ledger = PrivacyLedger()
        assert ledger.steps_within(private, epsilon=1e6, delta=DELTA) == 0


class TestJson:
    def test_round_trip(self):
        ledger = ledger_of(
            (POISSON, 3, 1),
            (PLAIN, 2),
            (changed(ONCE, notes=("a 'b'", "ü"), fixed_seed=True), 4),
            (changed(POISSON, private_state=True, uncovered=("ä", "b")), 5),
        )
        text = ledger.to_json()
        assert reloaded(ledger).entries == ledger.entries
        assert reloaded(ledger).to_json() == text
        # Strict JSON knows no infinity.
        assert "Infinity" not in text

    @pytest.mark.parametrize(
        "duplicate",
        [
            copy.copy,
            copy.deepcopy,
            reloaded,
            lambda ledger: pickle.loads(pickle.dumps(ledger)),
        ],
    )
    def test_copies_count_on_their_own(self, duplicate, path, writes):
        ledger = PrivacyLedger(path)
        ledger.charge(POISSON, 10)
        twin = duplicate(ledger)
        written = len(writes)
        twin.charge(POISSON, 5)
        assert (twin.path, len(writes)) == (None, written)
        ledger.charge(POISSON, 7)
        assert (twin.steps, ledger.steps) == (15, 17)
        twin.merge(ledger)
        assert twin.steps == 22
        assert twin.entries == (changed(POISSON, steps=22),)


class TestMerge:
    def test_keeps_the_longer_of_one_history(self):
        ledger = ledger_of((POISSON, 10), (BATCHES, 5))
        checkpoint = reloaded(ledger)
        ledger.charge(BATCHES, 3)
        ledger.charge(POISSON, 1)
        longer = ledger.entries
        ledger.merge(checkpoint)
        assert ledger.entries == longer
        checkpoint.merge(ledger)
        assert checkpoint.entries == longer

    def test_composes_both_of_a_fork(self):
        first = ledger_of((POISSON, 10))
        second = reloaded(first)
        first.charge(POISSON, 5)
        second.charge(BATCHES, 4)
        for _ in range(3):
            first.merge(second)
            assert first.entries == (
                changed(POISSON, steps=15),
                changed(BATCHES, steps=4),
            )

    def test_composes_equal_runs_of_different_models(self):
        first, second = ledger_of((POISSON, 10)), ledger_of((POISSON, 10))
        first.merge(second)
        assert first.steps == 20
        first.merge(second)
        assert first.steps == 20

    def test_epochs_never_swallow_single_steps(self):
        first = ledger_of((ONCE, 40, 1))
        first.merge(ledger_of((ONCE, 40)))
        assert first.epsilon(DELTA) == ledger_of((BATCHES, 41)).epsilon(DELTA)

    def test_goes_on_counting(self):
        first = ledger_of((POISSON, 10))
        first.merge(ledger_of((BATCHES, 3)))
        first.charge(POISSON, 2)
        assert first.entries == (
            changed(POISSON, steps=12),
            changed(BATCHES, steps=3),
        )

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_never_lowers_epsilon(self, order):
        root = ledger_of((POISSON, 500), (ONCE, 20, 1))
        ledgers = [root, reloaded(root), ledger_of((BATCHES, 4))]
        ledgers[0].charge(ONCE, 20, 1)
        ledgers[1].charge(ONCE, 30)
        merged = PrivacyLedger()
        for i in order:
            before = max(merged.epsilon(DELTA), ledgers[i].epsilon(DELTA))
            merged.merge(ledgers[i])
            assert merged.epsilon(DELTA) >= before
        assert merged.steps == 574

    @pytest.mark.parametrize(
        "change, said",
        [
            ({"noise_multiplier": 20.0}, "noise_multiplier is 1.3 in one and"),
            ({"examples": 600000}, "examples is 60000 in one and 600000"),
            ({"private_selection": True}, "private_selection is False in one"),
        ],
    )
    def test_refuses_steps_that_are_described_twice(self, change, said):
        ledger = ledger_of((POISSON, 10), (BATCHES, 2))
        other = edited(ledger, **change)
        for own, theirs in ((ledger, other), (other, ledger)):
            before = own.to_json()
            with pytest.raises(ValueError, match="describe the same steps"):
                own.merge(theirs)
            assert own.to_json() == before
        with pytest.raises(ValueError, match=said):
            ledger.merge(other)

    def test_refuses_single_steps_that_are_called_epochs(self):
        ledger = ledger_of((ONCE, 40))
        other = edited(ledger, epochs=1)
        for own, theirs in ((ledger, other), (other, ledger)):
            with pytest.raises(ValueError, match="one counts steps"):
                own.merge(theirs)

    def test_writes_only_what_is_new(self, path, writes):
        ledger = PrivacyLedger(path)
        ledger.charge(POISSON, 3)
        other = reloaded(ledger)
        written = len(writes)
        ledger.merge(other)
        ledger.merge(PrivacyLedger())
        assert len(writes) == written

    def test_is_durable(self, path):
        ledger = PrivacyLedger(path)
        ledger.merge(ledger_of((POISSON, 3)))
        assert PrivacyLedger(path).steps == 3

    def test_keeps_the_block_under_way(self, path):
        ledger = PrivacyLedger(path)
        ledger.reserve(POISSON, 50)
        ledger.charge(POISSON, 20)
        ledger.merge(ledger_of((BATCHES, 3)))
        assert PrivacyLedger(path).steps == 53


class TestWriteAhead:
    def test_block_is_recorded_before_it_runs(self, path, writes):
        ledger = PrivacyLedger(path)
        ledger.reserve(POISSON, 100, epochs=1)
        assert PrivacyLedger(path).entries == (
            changed(POISSON, steps=100, epochs=1),
        )
        assert ledger.steps == 0
        for _ in range(100):
            ledger.charge(POISSON)
        ledger.charge(POISSON, 0, 1)
        assert len(writes) == 1
        assert ledger.entries == PrivacyLedger(path).entries

    def test_charge_records_the_next_block(self, path, writes):
        ledger = PrivacyLedger(path, block=10)
        for step in range(1, 36):
            ledger.charge(POISSON)
            assert ledger.steps == step <= PrivacyLedger(path).steps
        assert len(writes) == 4
        ledger.charge(POISSON, 64)
        assert PrivacyLedger(path).steps == ledger.steps == 99

    def test_charge_of_another_entry_is_recorded(self, path):
        ledger = PrivacyLedger(path, block=10)
        ledger.charge(POISSON)
        ledger.charge(BATCHES)
        assert PrivacyLedger(path).entries == (
            changed(POISSON, steps=1),
            changed(BATCHES, steps=10),
        )

    def test_epoch_is_recorded_before_it_runs(self, path):
        ledger = PrivacyLedger(path)
        ledger.charge(ONCE, 1, 1)
        ledger.charge(ONCE, 1, 1)
        assert [entry.epochs for entry in PrivacyLedger(path).entries] == [2]

    def test_crash_spends_the_block(self, path):
        ledger = PrivacyLedger(path)
        ledger.reserve(POISSON, 64)
        ledger.charge(POISSON, 10)
        checkpoint = reloaded(ledger)
        del ledger
        resumed = PrivacyLedger(path)
        assert resumed.steps == 64
        resumed.merge(checkpoint)
        resumed.charge(POISSON, 6)
        resumed.settle()
        assert resumed.entries == (changed(POISSON, steps=70),)
        assert PrivacyLedger(path).entries == resumed.entries

    def test_checkpoint_newer_than_the_file(self, path):
        ledger = PrivacyLedger(path)
        ledger.reserve(POISSON, 10)
        before = path.read_bytes()
        ledger.reserve(POISSON, 100)
        ledger.charge(POISSON, 90)
        checkpoint = reloaded(ledger)
        path.write_bytes(before)
        resumed = PrivacyLedger(path)
        resumed.merge(checkpoint)
        assert resumed.steps == PrivacyLedger(path).steps == 90

    def test_settle_writes_the_true_count(self, path):
        ledger = PrivacyLedger(path)
        ledger.charge(POISSON, 3)
        assert PrivacyLedger(path).steps == 100
        ledger.settle()
        assert PrivacyLedger(path).steps == 3
        ledger.charge(POISSON)
        assert PrivacyLedger(path).steps == 103

    def test_next_block_gives_back_the_last(self, path):
        ledger = PrivacyLedger(path)
        ledger.reserve(POISSON, 100)
        ledger.charge(POISSON, 40)
        ledger.reserve(POISSON, 10)
        assert PrivacyLedger(path).steps == 50

    def test_json_holds_what_ran(self, path):
        ledger = PrivacyLedger(path)
        ledger.reserve(POISSON, 100)
        ledger.charge(POISSON, 40)
        assert reloaded(ledger).steps == 40

    def test_in_memory_nothing_is_reserved(self):
        ledger = PrivacyLedger()
        ledger.reserve(POISSON, 100)
        ledger.settle()
        assert ledger.entries == ()

    def test_failed_write_reserves_nothing(self, path, monkeypatch):
        ledger = PrivacyLedger(path, block=10)
        ledger.charge(POISSON, 10)
        before = path.read_bytes()

        def full(*_):
            raise OSError("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    ledger.charge(POISSON)
            with pytest.raises(OSError, match="No space left"):
                ledger.reserve(POISSON, 50)
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]
        ledger.charge(POISSON)
        assert ledger.steps == 13
        assert PrivacyLedger(path).steps == 22

    def test_file_that_another_run_writes(self, path):
        first, second = PrivacyLedger(path), PrivacyLedger(path)
        first.charge(POISSON)
        before = path.read_bytes()
        with pytest.raises(RuntimeError, match="Two runs must not share"):
            second.charge(POISSON)
        assert path.read_bytes() == before

    def test_fresh_path_needs_no_folder(self, path):
        assert PrivacyLedger(path).steps == 0
        assert not path.parent.exists()

    def test_an_empty_one_is_written_once(self, path, writes):
        ledger = PrivacyLedger(path)
        ledger.create()
        assert PrivacyLedger(path).entries == ()
        ledger.charge(POISSON, 3)
        for own in (ledger, PrivacyLedger(path), PrivacyLedger()):
            own.create()
        assert len(writes) == 2
        assert PrivacyLedger(path).steps == 100

    def test_block_is_positive(self, path):
        with pytest.raises(ValueError, match="block >= 1, got 0"):
            PrivacyLedger(path, block=0)
