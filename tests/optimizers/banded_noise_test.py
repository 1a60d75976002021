"""DP-SGD with bands: what a run releases, and what is refused."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import loss
from tf_dpsub import optimizers
from tf_dpsub.accounting import banded_factorization
from tf_dpsub.optimizers import banded_noise
from tf_dpsub.primitives import carried_noise
from tf_dpsub.training import run

ROWS, BATCH, INPUTS, OUTPUTS = 40, 4, 500, 4
SIGMA, CLIP, STEPS = 2.0, 0.5, 9


def dpsgd(inner=None, make=optimizers.DPSGD, **changes):
    settings = {
        "l2_norm_clip": CLIP,
        "batch_size": BATCH,
        "noise_multiplier": SIGMA,
    }
    inner = keras.optimizers.SGD(1.0) if inner is None else inner
    return make(inner, **settings | changes)


def private(optimizer, inputs=INPUTS, outputs=OUTPUTS):
    model = keras.Sequential(
        [
            keras.Input([inputs]),
            keras.layers.Dense(
                outputs, use_bias=False, kernel_initializer="zeros"
            ),
        ]
    )
    model = tf_dpsub.make_private(model)
    model.compile(optimizer, loss())
    return model


def nothing():
    """Examples whose gradients are zero: all that is released is noise."""
    return np.zeros((ROWS, INPUTS), np.float32), np.zeros(ROWS, int)


class Trajectory(keras.callbacks.Callback):
    """Keeps what each step releases, of one step in an epoch."""

    def on_train_begin(self, logs=None):
        self._last, self._moves = self._weights(), []

    def on_epoch_end(self, epoch, logs=None):
        present = self._weights()
        self._moves.append(BATCH * (self._last - present))
        self._last = present

    def _weights(self):
        return self.model.model.get_weights()[0].ravel().astype(float)

    @property
    def released(self):
        return np.array(self._moves)  # [steps, weights]


def released_by_fit(model, steps=STEPS):
    trajectory = Trajectory()
    model.fit(
        *nothing(),
        epochs=steps,
        steps_per_epoch=1,
        callbacks=[trajectory],
        verbose=0,
    )
    return trajectory.released


def fresh_noise(released, ratios):
    mixed = np.zeros_like(released)
    for j, ratio in enumerate(ratios):
        mixed[j:] += ratio * released[: len(released) - j]
    return mixed


@pytest.fixture(scope="module")
def two_runs():
    """A model with bands, and what two calls of `fit` have released."""
    model = private(dpsgd(bands=4))
    return model, [released_by_fit(model) for _ in range(2)]


class TestRun:
    def test_noise_is_that_of_the_matrix(self, two_runs):
        model, runs = two_runs
        c = banded_factorization.coefficients(4, STEPS)
        ratios = np.array(c) / c[0]
        for released in runs:
            fresh = fresh_noise(released, ratios)
            fresh /= SIGMA * CLIP * math.hypot(*ratios)
            products = fresh @ fresh.T / fresh.shape[1]
            assert np.allclose(
                products, np.eye(STEPS), atol=9 * math.sqrt(2 / 2000)
            )
            # Less is left of all steps than of independent noise.
            left = np.var(released.sum(0)) / (SIGMA * CLIP) ** 2
            assert left < 0.7 * STEPS

    def test_a_run_takes_nothing_back_of_another(self, two_runs):
        _, (first, second) = two_runs
        products = first[-3:] @ second[:3].T / len(first[0])
        size = np.var(first) + np.var(second)
        assert np.max(np.abs(products)) < 9 * size / math.sqrt(2000)

    def test_the_ledger_has_two_entries(self, two_runs):
        model, _ = two_runs
        assert [(e.steps, e.bands) for e in model.ledger.entries] == [
            (STEPS, 4)
        ] * 2
        assert "4 bands" in model.ledger.entries[0].mechanism
        # Three cycles each.
        assert model.epsilon(1e-5) == pytest.approx(
            tf_dpsub.accounting.epsilon(
                noise_multiplier=SIGMA,
                sampling_rate=4 * BATCH / ROWS,
                steps=6,
                delta=1e-5,
            )
        )

    def test_nothing_that_is_saved_has_the_noise(self, two_runs, tmp_path):
        model, _ = two_runs
        path = tmp_path / "model.keras"
        model.save(path)
        # One kernel and its ledger: no copy of the weights' size more.
        assert path.stat().st_size < 2 * INPUTS * OUTPUTS * 8
        shapes = [tuple(w.shape) for w in model.get_weights()]
        assert shapes == [(INPUTS, OUTPUTS)]
        # Counts of steps, and learning rates.
        assert all(v.shape == () for v in model.optimizer.variables)
        checkpoint = tf.train.Checkpoint(model=model).save(tmp_path / "point")
        shapes = [shape for _, shape in tf.train.list_variables(checkpoint)]
        assert sum(map(math.prod, shapes)) < 1.1 * INPUTS * OUTPUTS
        loaded = keras.models.load_model(path)
        assert loaded.optimizer.bands == 4
        assert loaded.epsilon(1e-5) == model.epsilon(1e-5)
        assert len(released_by_fit(loaded, 2)) == 2

    def test_several_steps_of_an_execution(self):
        model = private(dpsgd(bands=2, seed=1))
        model.compile(model.optimizer, loss(), steps_per_execution=4)
        other = private(dpsgd(bands=2, seed=1))
        for m in (model, other):
            m.fit(*nothing(), epochs=1, steps_per_epoch=8, verbose=0)
        assert np.array_equal(*(m.get_weights()[0] for m in (model, other)))


def test_other_batches_in_a_run_begin_a_cycle(two_runs):
    """Their groups and those before need not be far enough apart."""
    model, (released, _) = two_runs
    before = len(model.ledger.entries)
    entry = model.ledger.entries[0].description
    with run.Run(model, entry, steps_per_epoch=8) as present:
        present.begin_epoch(0)
        first, second = iter([]), iter([])
        for step, iterator in enumerate((first, first, second)):
            present.expect_step(step)
            present.take_from(iterator)
            present.charge(1)
        carried = model.optimizer.banded_noise._carried
        assert int(carried._steps) == 0
        carried._steps.assign(7)
        present.expect_step(3)
        present.take_from(second)
        assert int(carried._steps) == 7
    assert [e.steps for e in model.ledger.entries[before:]] == [2, 1]


class TestOneBand:
    def test_is_dpsgd_bit_for_bit(self, monkeypatch):
        def fail(*args):
            raise AssertionError

        monkeypatch.setattr(carried_noise.CarriedNoise, "__init__", fail)
        monkeypatch.setattr(banded_noise.BandedNoise, "noisy", fail)
        monkeypatch.setattr(banded_noise.BandedNoise, "grid_noises", fail)
        generator = np.random.default_rng(0)
        x = generator.normal(size=(ROWS, INPUTS)).astype(np.float32)
        y = generator.integers(0, OUTPUTS, ROWS)
        weights = []
        for kwargs in ({}, {"bands": 1}):
            keras.utils.set_random_seed(0)
            model = private(dpsgd(seed=3, **kwargs))
            model.fit(x, y, epochs=1, verbose=0)
            weights.append(model.model.get_weights()[0])
            assert model.ledger.entries[0].mechanism == "DPSGD"
            assert '"bands"' not in model.ledger.to_json()
        assert np.array_equal(*weights)

    def test_more_bands_than_one_change_the_noise(self):
        spacings = {}
        for bands in (1, 2):
            model = private(dpsgd(bands=bands, noise_multiplier=8.0))
            released_by_fit(model, 2)
            optimizer = model.optimizer
            sums = [np.zeros((INPUTS, OUTPUTS), np.float32)]
            (spacings[bands],) = optimizer._noises(
                [keras.ops.convert_to_tensor(s) for s in sums]
            )
        assert spacings[1].stddev == 8 * CLIP < spacings[2].stddev
        assert spacings[2].spacing < spacings[1].spacing


class TestCalibration:
    def test_spends_the_target_in_whole_cycles(self):
        model = private(
            dpsgd(bands=4, noise_multiplier=None, epsilon=2.0, delta=1e-5)
        )
        model.fit(*nothing(), epochs=2, verbose=0)
        (entry,) = model.ledger.entries
        assert (entry.steps, entry.bands) == (20, 4)
        assert 0.999 * 2 < model.epsilon(1e-5) <= 2
        spent = tf_dpsub.accounting.epsilon(
            noise_multiplier=entry.noise_multiplier,
            sampling_rate=4 * BATCH / ROWS,
            steps=5,
            delta=1e-5,
        )
        assert model.epsilon(1e-5) == pytest.approx(spent)

    def test_auto_is_the_best_for_the_whole_run(self, monkeypatch):
        asked = []

        def best_bands(*run):
            asked.append(run)
            return 2

        monkeypatch.setattr(banded_factorization, "best_bands", best_bands)
        optimizer = dpsgd(
            bands="auto", noise_multiplier=None, epsilon=2.0, delta=1e-5
        )
        with pytest.raises(RuntimeError, match='bands="auto", which `fit`'):
            _ = optimizer.bands
        model = private(optimizer)
        model.fit(*nothing(), epochs=2, verbose=0)
        assert asked == [(ROWS, BATCH, 20, 2.0, 1e-5)]
        assert [e.bands for e in model.ledger.entries] == [2]
        assert optimizer.get_config()["bands"] == "auto"

    def test_an_interrupted_run_goes_on_with_its_noise(self, tmp_path):
        def compiled():
            model = private(
                dpsgd(bands=3, noise_multiplier=None, epsilon=2.0, delta=1e-5)
            )
            return model

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    raise KeyboardInterrupt

        first = compiled()
        with pytest.raises(KeyboardInterrupt):
            first.fit(*nothing(), epochs=3, callbacks=[Stop()], verbose=0)
        first.save_weights(tmp_path / "model.weights.h5")
        second = compiled()
        second.load_weights(tmp_path / "model.weights.h5")
        second.fit(*nothing(), epochs=3, initial_epoch=2, verbose=0)
        entries = second.ledger.entries
        assert [e.steps for e in entries[:1]] == [20]
        assert entries[0].noise_multiplier == entries[1].noise_multiplier
        # 7 cycles, and then 3 of the 4 that ten steps would begin.
        assert entries[1].steps == 9
        assert second.epsilon(1e-5) <= 2


class TestRefusals:
    @pytest.mark.parametrize("bands", [0, -1, 2.5, "best"])
    def test_numbers(self, bands):
        with pytest.raises(ValueError, match="Expected bands"):
            dpsgd(bands=bands)

    def test_auto_without_a_target(self):
        with pytest.raises(ValueError, match="Give them, or a number of bands"):
            dpsgd(bands="auto")

    @pytest.mark.parametrize(
        "make, kwargs",
        [(optimizers.RGP, {}), (optimizers.DPPowerSGD, {"rank": 2})],
    )
    def test_coordinates_that_move(self, make, kwargs):
        with pytest.raises(ValueError, match="coordinates .* Take DPSGD"):
            dpsgd(make=make, bands=2, **kwargs)

    @pytest.mark.parametrize("name", ["AdaptiveDPSGD", "GEP", "ProjectedDPSGD"])
    def test_other_optimizers_have_none(self, name):
        kwargs = {}
        if name != "AdaptiveDPSGD":
            kwargs["subspace"] = tf_dpsub.subspaces.RandomSubspace(2)
        with pytest.raises(TypeError, match="'bands'.* Take DPSGD"):
            dpsgd(make=getattr(optimizers, name), bands=2, **kwargs)

    def test_batches_that_the_user_gives_cost_nothing(self):
        model = private(dpsgd(bands=2))
        x, y = nothing()
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        with pytest.raises(ValueError, match="Pass arrays or"):
            model.fit(rows, verbose=0)
        with pytest.raises(ValueError, match="Train by `fit`"):
            model.train_on_batch(x[:BATCH], y[:BATCH])
        too_many = private(dpsgd(bands=11))
        with pytest.raises(ValueError, match="at most 10 groups"):
            too_many.fit(x, y, verbose=0)
        assert model.ledger.steps == too_many.ledger.steps == 0
        assert not np.any(model.model.get_weights()[0])


def test_config_can_be_written():
    optimizer = dpsgd(bands=4)
    config = json.loads(json.dumps(optimizer.get_config(), default=str))
    assert config["bands"] == 4
    again = optimizers.DPSGD.from_config(optimizer.get_config())
    assert again.bands == 4
    earlier = optimizer.get_config()
    del earlier["bands"]
    assert optimizers.DPSGD.from_config(earlier).bands == 1
