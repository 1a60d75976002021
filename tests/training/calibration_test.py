"""The noise is found for the ε that an optimizer is given, by its own run."""

import functools
import math

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import loss
from tf_dpsub import layers, optimizers, subspaces

DELTA = 1e-5
ROWS, BATCH = 40, 8
EPOCHS, STEPS = 2, 10
CLIP = 0.5


@pytest.fixture(scope="module")
def examples():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 6)).astype("float32")
    return x, generator.integers(0, 3, ROWS)


def plain():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def dpsgd(epsilon=2.0, **kwargs):
    return optimizers.DPSGD(
        keras.optimizers.SGD(0.1),
        **{"epsilon": epsilon, "delta": DELTA, **common()} | kwargs,
    )


def common():
    return {"l2_norm_clip": CLIP, "batch_size": BATCH}


def private(optimizer, model=None, ledger_path=None, **kwargs):
    model = tf_dpsub.make_private(model or plain(), ledger_path=ledger_path)
    model.compile(optimizer, loss(), **kwargs)
    return model


def random_subspace():
    return subspaces.RandomSubspace(4)


MECHANISMS = {
    "DPSGD": (optimizers.DPSGD, dict),
    "AdaptiveDPSGD": (
        optimizers.AdaptiveDPSGD,
        lambda: {"clipped_count_stddev": 30.0},
    ),
    "ProjectedDPSGD": (
        optimizers.ProjectedDPSGD,
        lambda: {"subspace": random_subspace()},
    ),
    "GEP": (
        optimizers.GEP,
        lambda: {"subspace": random_subspace(), "residual_norm_clip": 0.1},
    ),
    "GEP, noise of its own for the residual": (
        optimizers.GEP,
        lambda: {
            "subspace": random_subspace(),
            "residual_norm_clip": 0.1,
            "residual_noise_multiplier": 9.0,
        },
    ),
    "B-GEP": (
        optimizers.GEP,
        lambda: {"subspace": random_subspace(), "residual": False},
    ),
    "RGP": (optimizers.RGP, dict),
    "DPPowerSGD": (optimizers.DPPowerSGD, lambda: {"rank": 2}),
}


@functools.cache
def spent(noise_multiplier, steps, rate=BATCH / ROWS):
    """Epsilon by dp-accounting itself."""
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = (
        gaussian
        if rate == 1
        else dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    )
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(event, steps)
    return accountant.get_epsilon(DELTA)


class TestTarget:
    @pytest.mark.parametrize("name", MECHANISMS)
    def test_is_kept_and_used_up(self, name, examples, capsys):
        mechanism, arguments = MECHANISMS[name]
        optimizer = mechanism(
            "sgd", epsilon=2.0, delta=DELTA, **common(), **arguments()
        )
        model = plain()
        if name == "RGP":
            layers.reparametrize(model, 2)
        model = private(optimizer, model)
        model.fit(*examples, epochs=EPOCHS, verbose=2)
        assert model.ledger.steps == STEPS
        (entry,) = model.ledger.entries
        assert entry.noise_multiplier == optimizer.effective_noise_multiplier
        of_run = spent(entry.noise_multiplier, STEPS)
        assert 2.0 * (1 - 2e-4) < of_run <= 2.0 * (1 + 1e-6)
        assert model.epsilon(DELTA) <= 2.0
        found = f"Noise multiplier {optimizer.noise_multiplier:.6g} for (ε = 2"
        assert found in capsys.readouterr().out
        statement = " ".join(model.privacy_statement(DELTA).split())
        plan = "(ε = 2, δ = 1e-05), 2 epochs of 5 steps"
        assert f"(found for {plan})" in statement
        assert "(ε = 2, δ = 1e-05)-differentially private" in statement

    def test_counts_what_was_spent_before(self, examples):
        model = private(
            optimizers.DPSGD("sgd", noise_multiplier=1.6, **common())
        )
        model.fit(*examples, verbose=0)
        before = model.epsilon(DELTA)
        alone = private(dpsgd())
        alone.fit(*examples, verbose=0)
        model.compile(dpsgd(), loss())
        model.fit(*examples, verbose=0)
        assert before > 1.5
        assert 2.0 * (1 - 2e-4) < model.epsilon(DELTA) <= 2.0
        first, second = model.ledger.entries
        assert first.target == ""
        assert second.noise_multiplier > (
            1.3 * alone.optimizer.noise_multiplier
        )

    def test_a_spent_one_is_refused_and_nothing_charged(self, examples):
        model = private(dpsgd())
        model.fit(*examples, verbose=0)
        x, y = examples
        with pytest.raises(ValueError, match=r"ε = 2\S* is spent already"):
            model.fit(x, y, verbose=0)
        # What calibration leaves is worth no step, of other rows neither.
        with pytest.raises(ValueError, match=r"ε = 2\S* is spent already"):
            model.fit(x[1:], y[1:], verbose=0)
        with pytest.raises(ValueError, match="raises ε to 3.*by `fit`"):
            model.train_on_batch(x[:BATCH], y[:BATCH])
        assert model.ledger.steps == STEPS // EPOCHS

    def test_warns_where_little_is_left(self, examples, caplog):
        model = private(
            optimizers.DPSGD("sgd", noise_multiplier=1.5, **common())
        )
        model.fit(*examples, verbose=0)
        model.compile(dpsgd(), loss())
        model.fit(*examples, verbose=0)
        assert "the ledger holds ε = 1.9" in caplog.text
        assert model.epsilon(DELTA) <= 2.0


class Refuse(keras.callbacks.Callback):
    """Ends a run before its first step."""

    def on_train_begin(self, logs=None):
        raise ValueError("not now")


def noise_of(model, train):
    """The noise multiplier that steps really had, and their number.

    Kernels have no gradient where inputs are zero: they get noise alone.
    """
    steps, before = model.ledger.steps, model.get_weights()[0]
    train()
    taken = model.ledger.steps - steps
    change = model.get_weights()[0] - before
    return np.std(change) * BATCH / (0.1 * CLIP * math.sqrt(taken)), taken


@pytest.fixture(scope="module")
def zeros(examples):
    return np.zeros((ROWS, 1000), "float32"), examples[1]


def wide():
    return keras.Sequential([keras.Input((1000,)), keras.layers.Dense(3)])


class TestStep:
    """Steps have the noise that the ledger records, of 3,000 numbers."""

    def test_of_runs_that_take_turns(self, zeros):
        """Each finds other noise, and the third has that of the first again."""
        x, y = zeros
        model = private(dpsgd(), wide())
        found = []
        for rows, epochs in ((ROWS, 80), (ROWS - 1, 4), (ROWS, 80)):
            measured, _ = noise_of(
                model,
                lambda rows=rows, epochs=epochs: model.fit(
                    x[:rows],
                    y[:rows],
                    epochs=epochs,
                    verbose=0,
                    callbacks=[Stop(after=1)],
                ),
            )
            found.append(model.optimizer.noise_multiplier)
            assert measured == pytest.approx(found[-1], rel=0.08)
        assert found[0] == found[2] > 1.5 * found[1]

    def test_of_a_run_within_a_run(self, zeros):
        model = private(dpsgd(), wide())

        class Nested(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                with pytest.raises(RuntimeError, match="in progress, got one"):
                    self.model.fit(*zeros, epochs=50, verbose=0)

        measured, taken = noise_of(
            model,
            lambda: model.fit(
                *zeros, epochs=EPOCHS, verbose=0, callbacks=[Nested()]
            ),
        )
        (entry,) = model.ledger.entries
        assert measured == pytest.approx(entry.noise_multiplier, rel=0.08)
        assert (taken, entry.steps) == (STEPS, STEPS)

    def test_of_an_optimizer_that_another_model_has_too(self, zeros):
        x, y = zeros
        plain, optimizer = wide(), dpsgd(8.0)
        first = private(optimizer, plain)
        first.fit(x, y, epochs=4, verbose=0, callbacks=[Stop(after=1)])
        second = private(optimizer, plain)
        with pytest.raises(ValueError, match="not now"):
            second.fit(x, y, epochs=200, callbacks=[Refuse()], verbose=0)
        measured, _ = noise_of(
            first, lambda: first.train_on_batch(x[:BATCH], y[:BATCH])
        )
        entry = first.ledger.entries[-1]
        assert measured == pytest.approx(entry.noise_multiplier, rel=0.08)

    def test_is_refused_where_it_changes_within_a_run(self, zeros):
        model = private(dpsgd(), wide(), run_eagerly=True)

        class Change(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 2:
                    self.model.optimizer.calibrate(0.1)

        with pytest.raises(RuntimeError, match="something has changed it"):
            model.fit(*zeros, verbose=0, callbacks=[Change()])
        assert model.ledger.steps == 2

    def test_of_a_given_multiplier_is_frozen(self):
        optimizer = optimizers.DPSGD("sgd", noise_multiplier=1.0, **common())
        with pytest.raises(ValueError, match="1.0, which is frozen"):
            optimizer.calibrate(5.0)


class Stop(keras.callbacks.Callback):
    """Stops after some epochs, whatever was planned."""

    def __init__(self, after):
        super().__init__()
        self._after = after

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self._after:
            self.model.stop_training = True


class TestSampling:
    def test_batches_of_a_dataset_have_no_amplification(self, examples):
        dataset = tf.data.Dataset.from_tensor_slices(examples).batch(BATCH)
        model = private(dpsgd())
        model.fit(dataset, epochs=EPOCHS, verbose=0)
        sigma = model.optimizer.noise_multiplier
        assert spent(sigma, STEPS, rate=1) == pytest.approx(2.0, rel=1e-3)

    def test_epochs_count_where_each_has_an_example_once(self, examples):
        dataset = tf.data.Dataset.from_tensor_slices(examples).batch(BATCH)
        model = private(dpsgd())
        model.fit(
            dataset,
            epochs=EPOCHS,
            verbose=0,
            each_example_once_per_epoch=True,
        )
        sigma = model.optimizer.noise_multiplier
        assert spent(sigma, EPOCHS, rate=1) == pytest.approx(2.0, rel=1e-3)

    def test_an_unknown_number_of_steps(self, examples):
        dataset = tf.data.Dataset.from_tensor_slices(examples).batch(BATCH)
        dataset = dataset.filter(lambda x, y: True)
        model = private(dpsgd())
        with pytest.raises(ValueError, match="known number.*steps_per_epoch"):
            model.fit(dataset, verbose=0)
        assert model.ledger.steps == 0
        model.fit(dataset.repeat(), steps_per_epoch=3, verbose=0)
        sigma = model.optimizer.noise_multiplier
        assert spent(sigma, 3, rate=1) == pytest.approx(2.0, rel=1e-3)

    def test_a_single_batch(self, examples):
        x, y = examples
        model = private(dpsgd())
        with pytest.raises(RuntimeError, match="none yet: `fit` finds it"):
            model.train_on_batch(x[:BATCH], y[:BATCH])


class TestResumption:
    """A run that goes on has the noise that it had."""

    @pytest.fixture
    def interrupted(self, examples, tmp_path):
        """The model of a run that ended after the first of two epochs."""
        model = private(dpsgd(), ledger_path=str(tmp_path / "ledger.json"))
        model.fit(*examples, epochs=EPOCHS, callbacks=[Stop(1)], verbose=0)
        assert model.ledger.steps == STEPS // 2
        return model

    def test_in_the_same_process(self, interrupted, examples):
        before = interrupted.optimizer.noise_multiplier
        interrupted.fit(*examples, epochs=EPOCHS, initial_epoch=1, verbose=0)
        assert interrupted.optimizer.noise_multiplier == before
        (entry,) = interrupted.ledger.entries
        assert entry.steps == STEPS

    def test_in_another_one(self, interrupted, examples, tmp_path, capsys):
        model = private(dpsgd(), ledger_path=str(tmp_path / "ledger.json"))
        model.fit(*examples, epochs=EPOCHS, initial_epoch=1, verbose=2)
        assert "as before the interruption" in capsys.readouterr().out
        (entry,) = model.ledger.entries
        assert entry.steps == STEPS
        assert 2.0 * (1 - 2e-4) < model.epsilon(DELTA) <= 2.0

    def test_lost_steps_count(self, interrupted, examples, tmp_path, caplog):
        """From the beginning again: only as many steps as are left."""
        model = private(dpsgd(), ledger_path=str(tmp_path / "ledger.json"))
        model.fit(*examples, epochs=EPOCHS, verbose=0)
        assert model.ledger.steps == STEPS
        assert "The run ends after 5 steps" in caplog.text
        assert model.epsilon(DELTA) <= 2.0

    def test_of_a_saved_model(self, interrupted, examples, tmp_path):
        path = tmp_path / "model.keras"
        interrupted.save(path)
        model = keras.saving.load_model(path)
        sigma = interrupted.optimizer.noise_multiplier
        assert model.optimizer.noise_multiplier == sigma
        assert str(model.optimizer.target) == "(ε = 2, δ = 1e-05)"
        model.fit(*examples, epochs=EPOCHS, initial_epoch=1, verbose=0)
        assert model.optimizer.noise_multiplier == sigma
        assert model.ledger.steps == STEPS

    def test_gep_keeps_both_of_its_multipliers(self, examples, tmp_path):
        def gep():
            return optimizers.GEP(
                "sgd",
                epsilon=2.0,
                delta=DELTA,
                subspace=random_subspace(),
                residual_norm_clip=0.1,
                **common(),
            )

        path = str(tmp_path / "ledger.json")
        first = private(gep(), ledger_path=path)
        first.fit(*examples, epochs=EPOCHS, callbacks=[Stop(1)], verbose=0)
        second = private(gep(), ledger_path=path)
        second.fit(*examples, epochs=EPOCHS, initial_epoch=1, verbose=0)
        assert second.optimizer.noise_multiplier == pytest.approx(
            first.optimizer.noise_multiplier, rel=1e-12
        )
        assert second.ledger.steps == STEPS
        assert second.epsilon(DELTA) <= 2.0

    def test_lost_steps_count_beside_a_budget(
        self, interrupted, examples, tmp_path
    ):
        """The run is as short as the budget wants it already."""
        model = private(dpsgd(), ledger_path=str(tmp_path / "ledger.json"))
        budget = tf_dpsub.callbacks.PrivacyBudget(2.0, DELTA)
        model.fit(*examples, epochs=EPOCHS, callbacks=[budget], verbose=0)
        assert model.ledger.steps == STEPS

    def test_a_limit_is_never_raised(self, interrupted, examples):
        """Neither by a larger budget nor by a callback."""

        class Longer(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.current_run.limit(1000)

        interrupted.fit(
            *examples, epochs=EPOCHS, verbose=0, callbacks=[Longer()]
        )
        assert interrupted.ledger.steps == STEPS
        assert interrupted.epsilon(DELTA) <= 2.0

    def test_another_plan_has_its_own_noise(self, interrupted, examples):
        before = interrupted.optimizer.noise_multiplier
        interrupted.fit(*examples, epochs=6, initial_epoch=1, verbose=0)
        assert interrupted.optimizer.noise_multiplier > 1.2 * before
        assert interrupted.ledger.steps == 6 * STEPS // EPOCHS
        assert 2.0 * (1 - 2e-4) < interrupted.epsilon(DELTA) <= 2.0

    def test_another_mechanism_has_its_own_noise(self, interrupted, examples):
        interrupted.compile(
            optimizers.AdaptiveDPSGD(
                "sgd",
                epsilon=4.0,
                delta=DELTA,
                clipped_count_stddev=5.0,
                **common(),
            ),
            loss(),
        )
        interrupted.fit(*examples, epochs=EPOCHS, verbose=0)
        assert 4.0 * (1 - 2e-4) < interrupted.epsilon(DELTA) <= 4.0

    # Keras says so of each epoch that ends early.
    @pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
    def test_epochs_that_are_shorter_than_stated(self, examples):
        """Of five batches, three at a time: epochs of 3, 2, 3, 2 steps."""
        dataset = tf.data.Dataset.from_tensor_slices(examples).batch(BATCH)
        model = private(dpsgd())
        for callback in (Stop(2), Stop(100)):
            model.fit(
                dataset,
                epochs=6,
                steps_per_epoch=3,
                each_example_once_per_epoch=True,
                verbose=0,
                callbacks=[callback],
            )
        (entry,) = model.ledger.entries
        assert entry.epochs == 6
        assert model.epsilon(DELTA) <= 2.0

    def test_what_comes_into_the_ledger_meanwhile(self, examples):
        other = private(
            optimizers.DPSGD("sgd", noise_multiplier=2.0, **common())
        )
        other.fit(*examples, verbose=0)
        weights = other.get_weights()

        class TakeUp(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    self.model.set_weights(weights)

        model = private(dpsgd())
        model.fit(*examples, epochs=4, verbose=0, callbacks=[TakeUp()])
        assert other.ledger.steps < model.ledger.steps < 4 * STEPS // EPOCHS
        assert model.epsilon(DELTA) <= 2.0

    def test_a_plan_that_never_began_does_not_bind(self, examples):
        model = private(dpsgd())
        with pytest.raises(ValueError, match="not now"):
            model.fit(*examples, epochs=50, callbacks=[Refuse()], verbose=0)
        model.fit(*examples, verbose=0)
        assert 2.0 * (1 - 2e-4) < model.epsilon(DELTA) <= 2.0


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({}, "Expected either noise_multiplier, or epsilon.*got neither"),
            (
                {"noise_multiplier": 1.0, "epsilon": 2.0, "delta": DELTA},
                "Give one of them",
            ),
            ({"epsilon": 2.0}, "epsilon and delta together, got 2.0 and None"),
            ({"noise_multiplier": 1.0, "delta": DELTA}, "together, got None"),
            ({"epsilon": -1.0, "delta": DELTA}, "0 < epsilon < inf"),
            ({"epsilon": math.inf, "delta": DELTA}, "0 < epsilon < inf"),
            ({"epsilon": 1.0, "delta": 1.0}, "delta"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            optimizers.DPSGD("sgd", **common(), **arguments)

    def test_no_clip(self):
        with pytest.raises(ValueError, match="finite l2_norm_clip"):
            dpsgd(l2_norm_clip=math.inf)

    def test_a_residual_that_spends_the_budget_alone(self):
        optimizer = optimizers.GEP(
            "sgd",
            epsilon=2.0,
            delta=DELTA,
            subspace=random_subspace(),
            residual_norm_clip=0.1,
            residual_noise_multiplier=1.5,
            **common(),
        )
        with pytest.raises(ValueError, match="leaves a part of the budget"):
            optimizer.calibrate(1.6)

    def test_a_count_with_too_little_noise(self, examples):
        optimizer = optimizers.AdaptiveDPSGD(
            "sgd", epsilon=0.1, delta=DELTA, **common()
        )
        model = private(optimizer)
        with pytest.raises(ValueError, match="clipped_count_stddev >"):
            model.fit(*examples, verbose=0)
        assert model.ledger.steps == 0

    def test_noise_that_is_not_found_yet(self):
        optimizer = dpsgd()
        with pytest.raises(RuntimeError, match="none yet: `fit` finds it"):
            optimizer.noise_multiplier  # noqa: B018
        assert not optimizer.is_calibrated
