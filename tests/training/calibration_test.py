"""The noise is found for the ε that an optimizer is given, by its own run."""

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


def private(optimizer, model=None, **kwargs):
    model = tf_dpsub.make_private(model or plain(), **kwargs)
    model.compile(optimizer, loss())
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
    "B-GEP": (
        optimizers.GEP,
        lambda: {"subspace": random_subspace(), "residual": False},
    ),
    "RGP": (optimizers.RGP, dict),
    "DPPowerSGD": (optimizers.DPPowerSGD, lambda: {"rank": 2}),
}


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
        assert "(found for (ε = 2, δ = 1e-05))" in statement
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
        for train in (
            lambda: model.fit(x, y, verbose=0),
            lambda: model.train_on_batch(x[:BATCH], y[:BATCH]),
        ):
            with pytest.raises(ValueError, match=r"ε = 2\S* is spent already"):
                train()
        assert model.ledger.steps == STEPS // EPOCHS

    def test_noise_of_a_step_is_what_was_found(self, examples):
        """Kernels have no gradient where inputs are zero: they get noise."""
        x = np.zeros((ROWS, 1000), "float32")
        y = examples[1]
        model = private(
            dpsgd(l2_norm_clip=1.0),
            keras.Sequential([keras.Input((1000,)), keras.layers.Dense(3)]),
        )
        batch = tf.data.Dataset.from_tensors((x, y))
        multipliers = []
        # The second is drawn otherwise: it has what the first has left.
        for data in ((x, y), (batch, None)):
            steps, before = model.ledger.steps, model.get_weights()[0]
            model.fit(*data, epochs=3, verbose=0, callbacks=[Stop(after=1)])
            taken = model.ledger.steps - steps
            found = model.get_weights()[0] - before
            sigma = model.optimizer.noise_multiplier
            expected = 0.1 * sigma / BATCH * math.sqrt(taken)
            # 3,000 numbers.
            assert np.std(found) == pytest.approx(expected, rel=0.08)
            multipliers.append(sigma)
        assert multipliers[1] > 1.3 * multipliers[0]


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

    def test_a_plan_that_never_began_does_not_bind(self, examples):
        model = private(dpsgd())

        class Refuse(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                raise ValueError("not now")

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

    def test_noise_of_the_residual(self):
        with pytest.raises(ValueError, match="no residual_noise_multiplier"):
            optimizers.GEP(
                "sgd",
                epsilon=2.0,
                delta=DELTA,
                subspace=random_subspace(),
                residual_norm_clip=0.1,
                residual_noise_multiplier=3.0,
                **common(),
            )

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
