"""Persons, epochs of random steps and bands, two of them in one run."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.accounting.entries import POISSON, changed
from tests.training.plain_models import X, Y, dpsgd, linear, private
from tf_dpsub import accounting, callbacks, data, pate
from tf_dpsub.accounting import accountants
from tf_dpsub.data import person_batches
from tf_dpsub.tuning import private_random_search

DELTA = 1e-5
# Of eight persons, each with one to four rows.
COUNTS = np.array([1, 2, 4, 3, 2, 3, 4, 1])
IDS = np.random.default_rng(3).permutation(np.repeat(np.arange(8), COUNTS))
STEPS = 4


def persons_of_steps(batches, steps):
    """The persons that each of some steps has drawn, a list of lists."""
    drawn = batches.dataset().take(steps).as_numpy_iterator()
    return [sorted(batch["y"][batch["real"] == 1]) for batch in drawn]


def persons(kind, groups=1):
    rows = kind(np.arange(len(IDS)), IDS, batch_size=2, seed=0)
    return person_batches.of_persons(rows, IDS, 1).in_groups(groups)


class TestPersonsOncePerEpoch:
    def test_each_person_is_in_one_batch_of_an_epoch(self):
        batches = persons(data.OncePerEpoch)
        assert batches.steps_per_epoch == STEPS
        assert batches.sampling_rate == 1 / STEPS
        drawn = persons_of_steps(batches, 3 * STEPS)
        epochs = [drawn[i : i + STEPS] for i in range(0, 3 * STEPS, STEPS)]
        assert all(sorted(sum(e, [])) == list(range(8)) for e in epochs)
        assert epochs[0] != epochs[1]

    def test_run(self):
        model = private(linear(), dpsgd(batch_size=2))
        model.fit(
            X[: len(IDS)],
            Y[: len(IDS)],
            epochs=2,
            person_ids=IDS,
            sampling="once_per_epoch",
            verbose=0,
        )
        (entry,) = model.ledger.entries
        assert (entry.unit, entry.examples) == ("person", 8)
        assert (entry.epochs, entry.epoch_steps) == (2, STEPS)
        assert model.epsilon(DELTA) == pytest.approx(
            accounting.epsilon(
                noise_multiplier=1.0,
                sampling_rate=1 / STEPS,
                steps=2 * STEPS,
                delta=DELTA,
                sampling="once_per_epoch",
            )
        )
        statement = " ".join(model.privacy_statement(DELTA).split())
        assert "each of the 8 persons was drawn at exactly one" in statement


class TestPersonsWithBands:
    def test_groups_split_persons(self):
        drawn = persons_of_steps(persons(data.PoissonBatches, 2), 200)
        groups = [set(sum(drawn[g::2], [])) for g in range(2)]
        assert sorted(map(len, groups)) == [4, 4]
        assert not groups[0] & groups[1]

    def test_run(self):
        model = private(linear(), dpsgd(batch_size=2, bands=2))
        model.fit(
            X[: len(IDS)], Y[: len(IDS)], epochs=1, person_ids=IDS, verbose=0
        )
        (entry,) = model.ledger.entries
        assert (entry.unit, entry.examples, entry.bands) == ("person", 8, 2)
        assert model.epsilon(DELTA) == pytest.approx(
            accounting.epsilon(
                noise_multiplier=1.0,
                sampling_rate=2 * 2 / 8,
                steps=STEPS // 2,
                delta=DELTA,
            )
        )
        statement = " ".join(model.privacy_statement(DELTA).split())
        assert "splits the 8 persons into 2 groups" in statement


class TestRefused:
    def refused(self, x, match, **arguments):
        model = private(linear(), dpsgd(bands=2))
        with pytest.raises(ValueError, match=match):
            model.fit(x, verbose=0, **arguments)
        assert model.ledger.steps == 0

    def test_bands_in_epochs_of_random_steps(self):
        self.refused(X, "take bands=1", y=Y, sampling="once_per_epoch")

    def test_bands_with_rates_of_rows(self):
        rates = np.full(len(X), 0.2)
        self.refused(
            data.PoissonBatches(X, Y, batch_size=4, sampling_rates=rates),
            "take bands=1",
        )

    def test_rates_of_rows_in_epochs_of_random_steps(self):
        with pytest.raises(ValueError, match="no sampling_rates where each"):
            data.OncePerEpoch(
                X, Y, batch_size=4, sampling_rates=np.full(len(X), 0.2)
            )


class TestUnits:
    """Steps and validation protect the same, or raise."""

    def fitted(self, **arguments):
        model = private(linear(), dpsgd())
        model.fit(X, Y, steps_per_epoch=1, verbose=0, **arguments)
        return model

    def test_validation_of_persons(self):
        ids = np.arange(len(X)) // 2
        model = self.fitted(person_ids=ids)
        model.evaluate_privately(
            X, Y, noise_multiplier=5.0, person_ids=ids, metrics={"loss": 2.0}
        )
        assert {entry.unit for entry in model.ledger.entries} == {"person"}
        assert 0 < model.epsilon(DELTA) < np.inf
        assert "10 persons, each by the means" in " ".join(
            model.privacy_statement(DELTA).split()
        )

    @pytest.mark.parametrize("of_persons", [False, True])
    def test_validation_of_another_unit(self, of_persons):
        ids = np.arange(len(X)) // 2
        model = self.fitted(**{} if of_persons else {"person_ids": ids})
        other = {"person_ids": ids} if of_persons else {}
        settings = {"noise_multiplier": 5.0, "metrics": {"loss": 2.0}}
        with pytest.raises(ValueError, match="person_ids to all of them"):
            model.evaluate_privately(X, Y, **settings, **other)
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="Give person_ids to both"):
            model.fit(
                X,
                Y,
                callbacks=[
                    callbacks.PrivateValidation(X, Y, **settings, **other)
                ],
                verbose=0,
                **{} if of_persons else {"person_ids": ids},
            )
        assert not model.ledger.entries


class Scaled(keras.callbacks.Callback):
    """Changes weights before each epoch but the first."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            weights = self.model.get_weights()
            self.model.set_weights([0.99 * w for w in weights])


class TestCyclesGoOn:
    """Whatever comes between steps with bands, no cycle is cut short."""

    @pytest.mark.parametrize("kind", ["releases", "changed weights"])
    def test_a_target_is_kept(self, kind):
        callback = {
            "releases": lambda: callbacks.PrivateValidation(
                X, Y, noise_multiplier=20.0, metrics={"loss": 2.0}
            ),
            "changed weights": Scaled,
        }[kind]()
        optimizer = dpsgd(
            noise_multiplier=None, epsilon=4.0, delta=DELTA, bands=4
        )
        model = private(linear(), optimizer)
        budget = callbacks.PrivacyBudget(4.0, DELTA)
        model.fit(X, Y, epochs=3, callbacks=[callback, budget], verbose=0)
        banded = [e for e in model.ledger.entries if e.bands > 1]
        # Five steps an epoch: 4 cycles, not two in each epoch.
        assert [entry.steps for entry in banded] == [15]
        assert bool(banded[0].uncovered) == (kind == "changed weights")
        assert 3.99 < model.epsilon(DELTA) <= 4.0

    def test_coefficients_are_those_of_the_run(self):
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        model = private(linear(), dpsgd(inner, bands=2))
        model.fit(X, Y, steps_per_epoch=2, verbose=0)
        sums = [np.zeros(v.shape) for v in model.trainable_variables]
        sums = [tf.constant(s) for s in sums]
        optimizer = model.optimizer
        before = optimizer.banded_noise.grid_noises(sums)
        inner.momentum = 0.0
        assert optimizer.banded_noise.grid_noises(sums) == before

    def test_groups_without_bands(self):
        batches = data.PoissonBatches(X, Y, batch_size=4).in_groups(2)
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="Leave `in_groups` out"):
            model.fit(batches, verbose=0)
        assert model.ledger.steps == 0


class TestSearches:
    def test_of_trials_with_bands(self):
        trial = changed(POISSON, bands=4, steps=8)
        ledger = accounting.PrivacyLedger()
        search = changed(POISSON, trial=(trial,), mean_trials=5.0)
        ledger.charge(search, 1)
        text = " ".join(accounting.statement(ledger, delta=DELTA).split())
        assert "with cyclic Poisson sampling" in text
        assert "adding or removing" not in text

    def test_of_trials_of_random_steps(self):
        trial = changed(
            POISSON,
            sampler="allocation",
            each_example_once_per_epoch=True,
            epoch_steps=10,
            steps=10,
            epochs=1,
        )
        entry = private_random_search._entry([trial], 5.0, 0.0)
        ledger = accounting.PrivacyLedger()
        ledger.charge(entry.description, 1)
        text = " ".join(accounting.statement(ledger, delta=DELTA).split())
        assert "with each example at one random step of an epoch" in text
        alone = accountants.composed_epsilon([trial.event()], delta=DELTA)
        assert alone < ledger.epsilon(DELTA) < 10 * alone


class TestBesideARun:
    def test_entries_of_votes_do_not_stand_for_lost_steps(self):
        model = private(linear(), dpsgd())
        model.fit(X, Y, steps_per_epoch=3, verbose=0)
        ledger = accounting.PrivacyLedger()
        aggregator = pate.ConfidentGNMax(
            teachers=20,
            classes=2,
            examples=100,
            threshold=10,
            threshold_noise=50.0,
            noise=50.0,
            ledger=ledger,
            seed=0,
        )
        aggregator.aggregate(np.zeros((5, 20), int), answers=2)
        model.ledger = ledger
        with pytest.raises(ValueError, match="counts all steps"):
            model.epsilon(DELTA)

    def test_a_release_in_a_callback_is_planned(self):
        class Evaluate(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.evaluate_privately(
                    X, Y, noise_multiplier=1.0, metrics={"loss": 2.0}
                )

        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="Use callbacks.PrivateValidation"):
            model.fit(X, Y, callbacks=[Evaluate()], verbose=0)
        assert {e.mechanism for e in model.ledger.entries} == {"DPSGD"}

    def test_missing_ids_are_nobody(self):
        model = private(linear(), dpsgd())
        ids = np.where(np.arange(len(X)) < 3, -1, np.arange(len(X)))
        with pytest.raises(ValueError, match="an id for each row"):
            model.evaluate_privately(
                X,
                Y,
                noise_multiplier=1.0,
                person_ids=ids,
                metrics={"loss": 2.0},
            )
        assert not model.ledger.entries

    def test_earlier_accounts_of_a_cycle_are_the_same(self):
        entry = changed(POISSON, bands=4)
        ledger = accounting.PrivacyLedger()
        ledger.charge(entry, 3)
        before = accounting.PrivacyLedger.from_json(ledger.to_json())
        ledger.charge(changed(entry, uncovered=("changes",)), 3)
        for first, second in ((ledger, before), (before, ledger)):
            merged = accounting.PrivacyLedger.from_json(first.to_json())
            merged.merge(second)
            (found,) = merged.entries
            assert (found.steps, found.uncovered) == (6, ("changes",))
