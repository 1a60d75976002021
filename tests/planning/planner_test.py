"""The planner, where it is known which method is better."""

import dataclasses
import math

import keras
import numpy as np
import pytest

from tf_dpsub import accounting, methods, planning
from tf_dpsub.layers import reparametrized_layers

INPUTS, CLASSES = 200, 4
RUN = {"examples": 2000, "delta": 1e-5, "epochs": 2, "batch_size": 100}
SEARCH = {"ranks": (8,), "carrier_ranks": (2,)}
SIMULATION = {"simulated_steps": 20, "points": 3}


def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input([INPUTS]), keras.layers.Dense(CLASSES, name="logits")]
    )


def data(dimensions, count=160):
    """Classes that are told apart in so many dimensions of the inputs."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, CLASSES, count)
    centres = generator.normal(size=(CLASSES, dimensions))
    latent = 2 * centres[labels] + generator.normal(size=(count, dimensions))
    directions = np.linalg.qr(generator.normal(size=(INPUTS, dimensions)))[0]
    return (latent @ directions.T).astype("float32"), labels


def arguments(**changes):
    """Arguments of `plan`, in groups, with some changed.

    With a noise multiplier, as no budget was given: searches for one take long.
    """
    noise = {} if "epsilon" in changes else {"noise_multiplier": 1.7}
    groups = {
        "run": (planning.PlannedRun, RUN | noise),
        "search": (planning.SearchSpace, SEARCH),
        "simulation": (planning.Simulation, SIMULATION),
    }
    grouped = {}
    for name, (kind, values) in groups.items():
        fields = [field.name for field in dataclasses.fields(kind)]
        own = {f: changes.pop(f) for f in fields if f in changes}
        grouped[name] = kind(**values | own)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss, "measure_cost": False} | grouped | changes


def planned(dimensions, **changes):
    return planning.plan(model(), *data(dimensions), **arguments(**changes))


def by_method(found):
    return {c.method: c for c in found.best}


@pytest.fixture(name="noisy", scope="module")
def _noisy():
    """A plan with much noise, where gradients lie in a subspace."""
    return planned(2, epsilon=0.05)


class TestRanking:
    def test_a_subspace_is_best_where_gradients_lie_in_one(self, noisy):
        best = by_method(noisy)
        assert noisy.recommended.method in ("PDP-SGD", "B-GEP")
        assert best["PDP-SGD"].alignment > best["DP-SGD"].alignment + 0.2
        assert best["PDP-SGD"].kept > 0.8

    def test_dp_sgd_is_best_where_they_do_not_and_noise_is_low(self):
        found = planned(
            INPUTS,
            noise_multiplier=0.3,
            methods=("DP-SGD", "PDP-SGD", "RGP"),
            ranks=(1,),
            carrier_ranks=(1,),
        )
        best = by_method(found)
        assert best["DP-SGD"].alignment > best["PDP-SGD"].alignment + 0.1
        assert best["DP-SGD"].alignment > best["RGP"].alignment
        assert best["PDP-SGD"].kept < best["DP-SGD"].kept

    def test_more_noise_is_worse(self, noisy):
        loose = by_method(planned(2, noise_multiplier=0.8))
        assert noisy.noise_multiplier > 8
        for method, candidate in by_method(noisy).items():
            other = loose[method]
            assert candidate.snr < other.snr
            assert candidate.alignment < other.alignment + 0.05, method


class TestPlan:
    def test_candidates(self, noisy):
        expected = [("DP-SGD", None)]
        expected += [(m, 8) for m in ("PDP-SGD", "B-GEP", "GEP")]
        expected += [("RGP", 2)]
        clips = sorted({c.l2_norm_clip for c in noisy.candidates})
        assert len(clips) == 3
        tried = [(c.method, c.rank, c.l2_norm_clip) for c in noisy.candidates]
        assert tried == [(m, k, c) for m, k in expected for c in clips]
        assert [c.alignment for c in noisy.best] == sorted(
            (c.alignment for c in noisy.best), reverse=True
        )
        text = "\n".join(noisy.reasons)
        assert all(method in text for method in methods.PLANNED)

    def test_noise_keeps_the_budget(self, noisy):
        assert noisy.steps == 40
        spent = accounting.epsilon(
            noise_multiplier=noisy.noise_multiplier,
            sampling_rate=0.05,
            steps=40,
            delta=1e-5,
        )
        assert 0.99 * 0.05 < spent <= 0.05
        best = by_method(noisy)
        sigma = noisy.noise_multiplier
        assert best["DP-SGD"].noise_multiplier == pytest.approx(sigma)
        # Two releases a step.
        assert best["GEP"].noise_multiplier == pytest.approx(
            math.sqrt(2) * sigma
        )

    def test_batch_size_is_the_smallest_that_is_good_enough(self):
        run = {"examples": 300, "epsilon": 1.0, "batch_size": None}
        found = planned(2, methods=("DP-SGD",), points=1, **run)
        noise = found.batch_noise
        assert list(noise) == [32, 64]
        enough = [b for b in noise if noise[b] <= 1.1 * min(noise.values())]
        assert found.batch_size == min(enough)

    def test_clips_follow_public_gradients(self, noisy):
        clips = sorted({c.l2_norm_clip for c in noisy.candidates})
        np.testing.assert_allclose(
            clips, np.array([0.1, 0.3, 1]) * noisy.median_norm, rtol=0.06
        )

    def test_another_basis(self, noisy):
        """Of examples without a signal: it keeps next to nothing."""
        generator = np.random.default_rng(1)
        images = generator.normal(size=(40, INPUTS)).astype("float32")
        other = planned(
            2,
            noise_multiplier=noisy.noise_multiplier,
            methods=("PDP-SGD",),
            basis=(images, None),
        )
        assert other.best[0].kept < 0.6 * by_method(noisy)["PDP-SGD"].kept

    def test_splits_are_averaged(self):
        changes = {"methods": ("DP-SGD",), "clips": (0.5,)}
        # At the initial weights: no path, and no noise of its own.
        changes["points"] = 1
        both = planned(2, splits=2, **changes).candidates[0].signal
        first, second = (
            planned(2, seed=seed, **changes).candidates[0].signal
            for seed in (0, 1)
        )
        assert first.gradient != second.gradient
        for name in ("gradient", "common", "released", "example"):
            mean = (getattr(first, name) + getattr(second, name)) / 2
            assert getattr(both, name) == pytest.approx(mean, rel=1e-4)

    def test_costs_of_several_ranks(self):
        own = model()
        before = [w.copy() for w in own.get_weights()]
        found = planning.plan(
            own,
            *data(2),
            **arguments(
                methods=("DP-SGD", "PDP-SGD", "RGP"),
                ranks=(4, 8, 500),
                clips=(0.5, 1.0),
                points=1,
                measure_cost=True,
            ),
        )
        for old, new in zip(before, own.get_weights()):
            np.testing.assert_array_equal(old, new)
        assert not reparametrized_layers(own)
        costs = {}
        for c in found.candidates:
            costs.setdefault((c.method, c.rank), []).append(c.cost)
        # More directions than public examples span are left out.
        expected = [("DP-SGD", None), ("PDP-SGD", 4), ("PDP-SGD", 8)]
        assert list(costs) == [*expected, ("RGP", 2)]
        assert [c.l2_norm_clip for c in found.candidates] == 4 * [0.5, 1.0]
        plain, *projected = (costs[key][0] for key in expected)
        for cost in (plain, *projected):
            assert cost.seconds(200) >= cost.seconds(100) > 0
        for rank, cost in zip((4, 8), projected):
            basis = 4 * rank * (INPUTS + 1) * CLASSES
            assert cost.state_bytes >= plain.state_bytes + basis

    def test_too_few_public_examples(self):
        message = "Expected 16 public examples at least"
        with pytest.raises(ValueError, match=message):
            planned(2, held_out=0.05)

    def test_gradients_without_a_common_direction(self):
        """Targets that have nothing to do with the inputs."""
        generator = np.random.default_rng(3)
        x = generator.normal(size=(40, INPUTS)).astype("float32")
        x -= x.mean(0)
        y = np.where(np.arange(40) % 2, 1.0, -1.0)[:, None]
        own = keras.Sequential(
            [
                keras.Input([INPUTS]),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros"
                ),
            ]
        )
        changes = {"loss": "mse", "methods": ("DP-SGD",), "points": 1}
        found = []
        for seed in range(4):
            try:
                planning.plan(
                    own,
                    x,
                    generator.permutation(y),
                    **arguments(**changes, seed=seed),
                )
                found.append(None)
            except ValueError as error:
                found.append(str(error))
        told = [f for f in found if f]
        # The estimate of its energy is below zero as often as above.
        assert told
        assert all("Expected public examples whose" in f for f in told)

    def test_needs_targets(self):
        with pytest.raises(ValueError, match="Expected targets.*`basis`"):
            planning.plan(model(), data(2)[0], None, **arguments())

    def test_a_model_without_carriers_has_no_rgp(self):
        own = keras.Sequential(
            [
                keras.Input([6, 2]),
                keras.layers.SimpleRNN(3),
                keras.layers.Dense(1),
            ]
        )
        generator = np.random.default_rng(0)
        found = planning.plan(
            own,
            generator.normal(size=(64, 6, 2)).astype("float32"),
            generator.normal(size=(64, 1)).astype("float32"),
            **arguments(loss="mse", methods=("DP-SGD", "RGP"), points=1),
        )
        assert {c.method for c in found.candidates} == {"DP-SGD"}


class TestFlatArguments:
    """Until version 0.2, as before there were groups."""

    def test_plan_alike(self):
        changes = {"methods": ("DP-SGD",), "clips": (0.5,), "points": 1}
        flat = {"noise_multiplier": 1.7} | changes
        with pytest.warns(FutureWarning, match="Expected run=PlannedRun"):
            plan = planning.plan(
                model(),
                *data(2),
                loss=keras.losses.SparseCategoricalCrossentropy(True),
                measure_cost=False,
                **RUN | SEARCH | SIMULATION | flat,
            )
        assert plan == planned(2, **changes)

    def test_an_unknown_one(self):
        with pytest.raises(TypeError, match="got 'epochss'"):
            planning.plan(None, None, None, loss="mse", **RUN, epochss=3)

    def test_none(self):
        with pytest.raises(TypeError, match="run=PlannedRun.*got none"):
            planning.plan(None, None, None, loss="mse")
