"""Training in which each example is drawn once in every epoch."""

import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import (
    EXACT,
    EXAMPLES,
    X,
    Y,
    dpsgd,
    linear,
    private,
)
from tf_dpsub import accounting, callbacks, data

DELTA = 1e-5
# The optimizer's batches of 4 of 20 examples.
STEPS = 5


def epsilon_of(epochs, noise_multiplier=1.0, accountant="pld"):
    return accounting.epsilon(
        noise_multiplier=noise_multiplier,
        sampling_rate=1 / STEPS,
        steps=STEPS * epochs,
        delta=DELTA,
        accountant=accountant,
        sampling="once_per_epoch",
    )


def trained(epochs=2, optimizer=None, **arguments):
    model = private(linear(), optimizer or dpsgd())
    model.fit(
        X,
        Y,
        epochs=epochs,
        verbose=0,
        sampling="once_per_epoch",
        **arguments,
    )
    return model


class StopAt(tf.keras.callbacks.Callback):
    """Ends training after some step of some epoch."""

    def __init__(self, epoch, step):
        super().__init__()
        self.place, self.epoch = (epoch, step), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def two_epochs():
    return trained()


def test_the_ledger_counts_epochs(two_epochs):
    (entry,) = two_epochs.ledger.entries
    assert entry.sampler == "allocation"
    assert entry.epoch_steps == STEPS
    assert entry.examples == EXAMPLES
    assert (entry.steps, entry.epochs) == (2 * STEPS, 2)
    for accountant in ("rdp", "pld"):
        assert two_epochs.epsilon(DELTA, accountant) == epsilon_of(
            2, accountant=accountant
        )


def test_costs_less_than_poisson_sampling_and_than_shuffling(two_epochs):
    run = dict(noise_multiplier=1.0, delta=DELTA)
    poisson = accounting.epsilon(sampling_rate=0.2, steps=2 * STEPS, **run)
    shuffled = accounting.epsilon(sampling_rate=1.0, steps=2, **run)
    assert two_epochs.epsilon(DELTA) < 0.9 * poisson < 0.9 * shuffled


def test_the_statement_names_the_sampler(two_epochs):
    text = " ".join(two_epochs.privacy_statement(DELTA).split())
    assert "with each example at one random step of an epoch" in text
    assert "in every epoch of 5 steps each of the 20 examples" in text


class Count(tf.keras.metrics.Sum):
    """Counts the examples that a metric sees."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        ones = tf.ones([tf.shape(y_pred)[0], 1])
        super().update_state(ones, sample_weight)


def test_every_example_is_in_one_step_of_an_epoch():
    model = private(linear(), dpsgd(**EXACT), metrics=[Count(name="count")])
    history = model.fit(
        X, Y, epochs=4, verbose=0, sampling="once_per_epoch"
    ).history
    assert history["count"] == [EXAMPLES] * 4


def test_further_calls_count_on(two_epochs):
    model = private(linear(), dpsgd())
    batches = data.OncePerEpoch(X, Y, batch_size=4)
    model.fit(batches, epochs=1, verbose=0)
    model.fit(batches, epochs=1, verbose=0, sampling="once_per_epoch")
    assert model.epsilon(DELTA) == two_epochs.epsilon(DELTA)


def test_an_epoch_that_was_left_counts_whole_and_so_does_the_next(tmp_path):
    path = tmp_path / "ledger.json"
    model = tf_dpsub.make_private(linear(), ledger_path=path)
    model.compile(dpsgd(), loss="mse")
    targets = np.zeros([EXAMPLES, 3], "float32")
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            X,
            targets,
            epochs=2,
            verbose=0,
            sampling="once_per_epoch",
            callbacks=[StopAt(1, 2)],
        )
    (entry,) = accounting.PrivacyLedger(path).entries
    assert (entry.steps, entry.epochs) == (STEPS + 3, 2)
    assert model.epsilon(DELTA) == epsilon_of(2)
    model.fit(
        X,
        targets,
        initial_epoch=1,
        epochs=2,
        verbose=0,
        sampling="once_per_epoch",
    )
    (entry,) = model.ledger.entries
    assert (entry.steps, entry.epochs) == (2 * STEPS + 3, 3)
    assert model.epsilon(DELTA) == epsilon_of(3)


def test_a_crash_within_an_epoch_has_it_on_disk(tmp_path):
    path = tmp_path / "ledger.json"
    model = tf_dpsub.make_private(linear(), ledger_path=path)
    model.compile(dpsgd(), loss="mse")
    seen = []

    class Look(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                seen.extend(accounting.PrivacyLedger(path).entries)

    model.fit(
        X,
        np.zeros([EXAMPLES, 3], "float32"),
        verbose=0,
        sampling="once_per_epoch",
        callbacks=[Look()],
    )
    assert [(entry.steps, entry.epochs) for entry in seen] == [(STEPS, 1)]


def test_finds_the_noise_for_a_target():
    optimizer = dpsgd(noise_multiplier=None, epsilon=3.0, delta=DELTA)
    model = trained(optimizer=optimizer)
    assert 3 * (1 - 1e-4) < model.epsilon(DELTA) <= 3
    assert optimizer.noise_multiplier < accounting.noise_multiplier(
        epsilon=3.0, delta=DELTA, sampling_rate=0.2, steps=2 * STEPS
    )
    with pytest.raises(ValueError, match="is spent already"):
        model.fit(X, Y, epochs=1, verbose=0, sampling="once_per_epoch")


def test_a_budget_counts_whole_epochs():
    budget = callbacks.PrivacyBudget(epsilon_of(2) + 1e-6, DELTA)
    assert trained(callbacks=[budget]).epsilon(DELTA) == epsilon_of(2)
    model = private(linear(), dpsgd())
    with pytest.raises(ValueError, match="got 3 epochs.*2 epochs fit"):
        model.fit(
            X,
            Y,
            epochs=3,
            verbose=0,
            sampling="once_per_epoch",
            callbacks=[budget],
        )
    assert model.ledger.steps == 0


def test_what_is_charged_within_an_epoch_begins_another():
    """The rest of the epoch counts as one, and the budget is kept."""
    model = private(linear(), dpsgd())
    other = accounting.LedgerEntry(
        mechanism="other",
        noise_multiplier=1e4,
        l2_norm_clip=1.0,
        batch_size=EXAMPLES,
        examples=EXAMPLES,
        sampler="batches",
    )

    class Charge(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and model.ledger.steps < STEPS:
                model.ledger.charge(other, 1)

    budget = callbacks.PrivacyBudget(epsilon_of(3) + 0.1, DELTA)
    model.fit(
        X,
        Y,
        epochs=3,
        verbose=0,
        sampling="once_per_epoch",
        callbacks=[Charge(), budget],
    )
    assert [
        (entry.steps, entry.step_events)
        for entry in model.ledger.entries
        if entry.mechanism != "other"
    ] == [(3, 1), (2 + STEPS, 2)]
    assert epsilon_of(3) < model.epsilon(DELTA) <= budget.epsilon


def test_steps_run_together_within_an_epoch():
    model = private(linear(), dpsgd(), steps_per_execution=3)
    model.fit(X, Y, epochs=2, verbose=0, sampling="once_per_epoch")
    (entry,) = model.ledger.entries
    assert (entry.steps, entry.epochs) == (2 * STEPS, 2)


def rows_of_dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


@pytest.mark.parametrize(
    "x, y, arguments, message",
    [
        (X, Y, {"sampling": "shuffled"}, "Expected sampling to be one of"),
        (
            X,
            Y,
            {"sampling": "once_per_epoch", "steps_per_epoch": 4},
            "Expected steps_per_epoch=5, .* got 4. Leave it out",
        ),
        (
            X,
            Y,
            {
                "sampling": "once_per_epoch",
                "each_example_once_per_epoch": True,
            },
            "Expected each_example_once_per_epoch=False.* Leave it out",
        ),
        (
            rows_of_dataset,
            None,
            {"sampling": "once_per_epoch"},
            r"got a tf.data.Dataset of batches.*data.OncePerEpoch\(rows",
        ),
        (
            lambda: data.PoissonBatches(X, Y, batch_size=4),
            None,
            {"sampling": "once_per_epoch"},
            "Expected sampling='poisson', that of the given PoissonBatches, "
            "got 'once_per_epoch'. Leave it out, or give "
            "`tf_dpsub.data.OncePerEpoch`",
        ),
        (
            lambda: data.OncePerEpoch(X, Y, batch_size=4),
            None,
            {"sampling": "poisson"},
            "got 'poisson'",
        ),
        (
            lambda: data.OncePerEpoch(X, Y, batch_size=5),
            None,
            {},
            "Expected batch_size=4",
        ),
    ],
)
def test_contradictions_are_refused_and_cost_nothing(x, y, arguments, message):
    model = private(linear(), dpsgd())
    with pytest.raises(ValueError, match=message):
        model.fit(x() if callable(x) else x, y, verbose=0, **arguments)
    assert model.ledger.steps == 0
    assert model.epsilon(DELTA) == 0
