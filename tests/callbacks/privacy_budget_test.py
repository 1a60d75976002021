import io
import math
from contextlib import redirect_stdout

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub import accounting
from tf_dpsub.callbacks import PrivacyBudget, PrivateValidation

EXAMPLES, BATCH, DELTA = 100, 20, 1e-5
STEPS_PER_EPOCH = 5


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 4)).astype("float32")
    return x, rng.integers(0, 3, EXAMPLES)


def private_model(noise_multiplier=2.0, ledger_path=None, **compile_arguments):
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
        ledger_path=ledger_path,
    )
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            noise_multiplier=noise_multiplier,
            l2_norm_clip=1.0,
            batch_size=BATCH,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **compile_arguments,
    )
    return model


def endless(arrays):
    """A dataset of batches whose number is not known before it ends."""
    x, y = arrays
    return tf.data.Dataset.from_generator(
        lambda: ((x[:BATCH], y[:BATCH]) for _ in range(500)),
        output_signature=(
            tf.TensorSpec([BATCH, 4]),
            tf.TensorSpec([BATCH], tf.int64),
        ),
    )


def poisson_epsilon(steps, accountant="pld"):
    return accounting.epsilon(
        noise_multiplier=2.0,
        sampling_rate=BATCH / EXAMPLES,
        steps=steps,
        delta=DELTA,
        accountant=accountant,
    )


def epsilon_of_releases(releases, noise_multiplier):
    """Epsilon without amplification."""
    return accounting.epsilon(
        noise_multiplier=noise_multiplier,
        sampling_rate=1.0,
        steps=releases,
        delta=DELTA,
        accountant="pld",
    )


class TestShown:
    @pytest.mark.parametrize(
        "accountant, epochs, verbose", [("rdp", 3, 1), ("pld", 1, 2)]
    )
    def test_after_each_epoch(self, arrays, accountant, epochs, verbose):
        """In the history, to later callbacks, and by the progress bar."""
        epsilons = []
        later = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: epsilons.append(logs["epsilon"])
        )
        shown = io.StringIO()
        with redirect_stdout(shown):
            history = private_model().fit(
                *arrays,
                epochs=epochs,
                verbose=verbose,
                callbacks=[PrivacyBudget(10.0, DELTA, accountant), later],
            )
        expected = [
            poisson_epsilon(STEPS_PER_EPOCH * (epoch + 1), accountant)
            for epoch in range(epochs)
        ]
        assert history.history["epsilon"] == pytest.approx(expected, rel=1e-9)
        assert epsilons == pytest.approx(expected)
        lines = [line for line in shown.getvalue().splitlines() if line]
        ends = [line.rpartition(" - ")[2] for line in lines]
        for epsilon in expected:
            assert f"epsilon: {epsilon:.4f}" in ends

    def test_without_limit_epsilon_is_shown_even_if_infinite(self, arrays):
        history = private_model(noise_multiplier=0.0).fit(
            *arrays,
            verbose=0,
            callbacks=[PrivacyBudget(math.inf, DELTA)],
        )
        assert history.history["epsilon"] == [math.inf]


class TestRefusedBeforeItStarts:
    def test_says_what_the_run_costs_and_how_much_fits(self, arrays):
        model = private_model()
        weights = model.get_weights()
        budget = 3.0
        fitting = max(n for n in range(1, 60) if poisson_epsilon(n) <= budget)
        with pytest.raises(ValueError) as error:
            model.fit(
                *arrays,
                epochs=30,
                verbose=0,
                callbacks=[PrivacyBudget(budget, DELTA)],
            )
        message = str(error.value)
        assert "150 steps (30 epochs)" in message
        assert f"from 0 to {poisson_epsilon(150):.4g}" in message
        epochs = fitting // STEPS_PER_EPOCH
        assert f"{fitting} steps ({epochs} whole epochs) fit" in message
        assert model.epsilon(DELTA) == 0.0
        for before, after in zip(weights, model.get_weights()):
            np.testing.assert_array_equal(before, after)

    def test_exactly_what_fits_is_accepted(self, arrays):
        budget = PrivacyBudget(poisson_epsilon(10) * (1 + 1e-9), DELTA)
        model = private_model()
        model.fit(*arrays, epochs=2, verbose=0, callbacks=[budget])
        assert model.ledger.steps == 10
        with pytest.raises(ValueError, match="0 steps"):
            model.fit(*arrays, verbose=0, callbacks=[budget])
        assert model.ledger.steps == 10
        # Earlier calls of fit count.
        spent, cost = poisson_epsilon(10), poisson_epsilon(20)
        message = f"from {spent:.4g} to {cost:.4g}: 5 steps"
        with pytest.raises(ValueError, match=message):
            model.fit(
                *arrays,
                epochs=2,
                verbose=0,
                callbacks=[PrivacyBudget(poisson_epsilon(15) + 1e-9, DELTA)],
            )

    def test_a_run_without_noise(self, arrays):
        with pytest.raises(ValueError, match="to inf: 0 steps"):
            private_model(noise_multiplier=0.0).fit(
                *arrays, verbose=0, callbacks=[PrivacyBudget(1e6, DELTA)]
            )

    def test_an_epoch_that_gives_each_example_once_is_one_release(self, arrays):
        batches = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)

        def fit(model, epochs):
            model.fit(
                batches,
                epochs=epochs,
                verbose=0,
                each_example_once_per_epoch=True,
                callbacks=[PrivacyBudget(6.0, DELTA)],
            )

        fitting = max(
            n for n in range(1, 20) if epsilon_of_releases(n, 2.0) <= 6.0
        )
        # Counted step by step, these epochs would cross the budget.
        steps = STEPS_PER_EPOCH * fitting
        assert epsilon_of_releases(steps, 2.0) > 6.0
        model = private_model()
        message = f"got {fitting + 1} epochs, .*: {fitting} epochs fit"
        with pytest.raises(ValueError, match=message):
            fit(model, fitting + 1)
        fit(model, fitting)
        assert model.ledger.steps == steps
        spent = epsilon_of_releases(fitting, 2.0)
        assert model.epsilon(DELTA) == pytest.approx(spent)


# Keras says so whenever a dataset of unknown size ends.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
class TestStopped:
    @pytest.mark.parametrize("steps_per_execution", [1, 8])
    def test_before_the_budget_is_crossed(self, arrays, steps_per_execution):
        fitting = max(
            n for n in range(1, 99) if epsilon_of_releases(n, 10.0) <= 3.0
        )
        model = private_model(10.0, steps_per_execution=steps_per_execution)
        budget = PrivacyBudget(3.0, DELTA)
        history = model.fit(
            endless(arrays), epochs=3, verbose=0, callbacks=[budget]
        )
        assert model.ledger.steps == fitting
        assert int(model.optimizer.iterations) == fitting
        spent = epsilon_of_releases(fitting, 10.0)
        assert history.history["epsilon"] == [pytest.approx(spent)]
        with pytest.raises(ValueError, match="not even one step fits"):
            model.fit(endless(arrays), verbose=0, callbacks=[budget])
        assert model.ledger.steps == fitting

    def test_the_limit_ends_with_the_run(self, arrays):
        model = private_model(10.0)
        model.fit(
            endless(arrays).take(2),
            verbose=0,
            callbacks=[PrivacyBudget(3.0, DELTA)],
        )
        model.fit(*arrays, epochs=20, verbose=0)
        assert model.ledger.steps == 2 + 20 * STEPS_PER_EPOCH


class Meanwhile(keras.callbacks.Callback):
    """Does something to the model before the second epoch."""

    def __init__(self, action):
        super().__init__()
        self._action = action

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self._action(self.model)


class TestBesideOthers:
    """What else the ledger counts leaves less of the budget."""

    def test_what_is_merged_during_the_run(self, arrays, caplog):
        others = private_model()
        others.fit(*arrays, epochs=2, verbose=0)
        # Both together, and three steps less than the run plans.
        budget = PrivacyBudget(poisson_epsilon(22) + 1e-6, DELTA)
        model = private_model()
        merge = Meanwhile(lambda model: model.ledger.merge(others.ledger))
        model.fit(*arrays, epochs=3, verbose=0, callbacks=[budget, merge])
        assert model.ledger.steps == 22
        assert model.epsilon(DELTA) <= budget.epsilon
        assert "The run ends after 7 steps" in caplog.text

    def test_what_was_released_before_it(self, arrays):
        model = private_model()
        model.evaluate_privately(*arrays, noise_multiplier=5.0)
        spent = model.epsilon(DELTA)
        budget = PrivacyBudget(poisson_epsilon(5) + 1e-6, DELTA)
        with pytest.raises(ValueError, match=f"from {spent:.4g} to .*: [0-4] "):
            model.fit(*arrays, verbose=0, callbacks=[budget])
        assert model.ledger.steps == 1

    def test_a_release_that_was_not_planned(self, arrays):
        """It is refused where it would cross the budget; steps give way."""
        model = private_model()

        def fit(epsilon, noise_multiplier):
            entry = PrivateValidation(
                *arrays, noise_multiplier=noise_multiplier
            ).planned_entry(model, 0, 1)
            entry = entry.description
            release = Meanwhile(lambda m: m.current_run.charge_release(entry))
            model.fit(
                *arrays,
                epochs=3,
                verbose=0,
                callbacks=[PrivacyBudget(epsilon, DELTA), release],
            )

        with pytest.raises(ValueError, match="of PrivateValidation beyond"):
            fit(poisson_epsilon(15) + 1e-6, 1.5)
        # The first epoch alone has run.
        assert model.ledger.steps == 5
        epsilon = poisson_epsilon(20) + 1e-6
        fit(epsilon, 3.0)
        assert model.ledger.entries[1].steps == 1
        assert 10 < model.ledger.entries[0].steps < 20
        assert model.epsilon(DELTA) <= epsilon

    def test_the_refusal_names_releases(self, arrays):
        budget = PrivacyBudget(poisson_epsilon(10), DELTA)
        validation = PrivateValidation(*arrays, noise_multiplier=9.0)
        message = (
            r"got 10 steps \(2 epochs\) and 2 releases of PrivateValidation, "
            "which .* fit beside these releases. .*, release less often"
        )
        with pytest.raises(ValueError, match=message):
            private_model().fit(
                *arrays, epochs=2, verbose=0, callbacks=[budget, validation]
            )
        with pytest.raises(ValueError, match="fits beside 1 releases of Priv"):
            private_model().fit(
                endless(arrays),
                verbose=0,
                callbacks=[PrivacyBudget(1e-3, DELTA), validation],
            )

    def test_another_run_of_the_same_file(self, arrays, tmp_path):
        path = str(tmp_path / "ledger.json")
        first, second = (private_model(ledger_path=path) for _ in range(2))
        first.fit(*arrays, verbose=0)
        # It would not see the steps of the first one.
        budget = PrivacyBudget(poisson_epsilon(5) + 1e-6, DELTA)
        with pytest.raises(RuntimeError, match="Two runs must not share"):
            second.fit(*arrays, verbose=0, callbacks=[budget])
        third = private_model(ledger_path=path)
        with pytest.raises(ValueError, match=": 0 steps"):
            third.fit(*arrays, verbose=0, callbacks=[budget])


class TestOfPersons:
    def epsilon(self, steps, rows):
        return accounting.epsilon(
            noise_multiplier=8.0,
            sampling_rate=BATCH / EXAMPLES,
            steps=steps,
            delta=DELTA,
            rows_per_person=rows,
        )

    def test_rows_of_one_person_count_together(self, arrays):
        epsilon = self.epsilon(10, 3)
        assert epsilon > 3 * self.epsilon(10, 1)
        budget = PrivacyBudget(epsilon + 1e-6, DELTA, rows_per_person=3)
        model = private_model(8.0)
        message = "person with at most 3 rows, got 15 steps .*: 10 steps"
        with pytest.raises(ValueError, match=message):
            model.fit(*arrays, epochs=3, verbose=0, callbacks=[budget])
        history = model.fit(
            *arrays, epochs=2, verbose=0, callbacks=[budget]
        ).history
        expected = [self.epsilon(5, 3), epsilon]
        assert history["epsilon"] == pytest.approx(expected)

    def test_persons_that_are_drawn_are_the_unit(self, arrays):
        budget = PrivacyBudget(self.epsilon(5, 1) + 1e-6, DELTA, "pld", 7)
        model = private_model(8.0)
        model.fit(
            *(np.repeat(a, 2, axis=0) for a in arrays),
            person_ids=np.repeat(np.arange(EXAMPLES), 2),
            verbose=0,
            callbacks=[budget],
        )
        assert model.ledger.steps == 5


class StopBeforeTraining(keras.callbacks.Callback):
    """Ends a run when all callbacks have begun."""

    def on_epoch_begin(self, epoch, logs=None):
        raise KeyboardInterrupt


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ((0.0, DELTA), "Expected epsilon > 0, got 0.0"),
            ((-1.0, DELTA), "Expected epsilon > 0, got -1.0"),
            ((math.nan, DELTA), "Expected epsilon > 0, got nan"),
            ((1.0, 0.0), "Expected 0 < delta < 1, got 0.0"),
            ((1.0, 1.0), "Expected 0 < delta < 1, got 1.0"),
            ((1.0, math.nan), "Expected 0 < delta < 1, got nan"),
            ((1.0, DELTA, "gdp"), "Expected accountant .*, got 'gdp'"),
            ((1.0, DELTA, "pld", 0), "Expected rows_per_person"),
        ],
    )
    def test_arguments_out_of_range(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            PrivacyBudget(*arguments)

    def test_a_plain_model(self, arrays):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(loss="mse")
        with pytest.raises(ValueError, match="Expected a private model, got"):
            model.fit(
                arrays[0], verbose=0, callbacks=[PrivacyBudget(1.0, DELTA)]
            )

    @pytest.mark.parametrize("delta", [1 / EXAMPLES, 0.5])
    def test_warns_of_a_delta_that_promises_nothing(self, arrays, delta):
        # A warning is an error, which ends the run before it begins.
        with pytest.raises(UserWarning, match="well below 1 / 100"):
            private_model().fit(
                *arrays, verbose=0, callbacks=[PrivacyBudget(9.0, delta)]
            )

    def test_does_not_warn_of_a_smaller_delta(self, arrays, recwarn):
        callbacks = [PrivacyBudget(9.0, 0.0099), StopBeforeTraining()]
        with pytest.raises(KeyboardInterrupt):
            private_model().fit(*arrays, verbose=0, callbacks=callbacks)
        assert not [w for w in recwarn if "delta" in str(w.message)]
