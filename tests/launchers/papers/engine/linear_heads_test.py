"""Heads learn, spend their budget, and are simulated as they are."""

import dataclasses

import numpy as np
import pytest

from tf_dpsub.launchers.papers.engine import feature_cache, linear_heads

SETTING = linear_heads.Setting(rate=1.0, clip=0.1, steps=20)


class TestTrain:
    def split(self, test=500):
        generator = np.random.default_rng(0)
        y = generator.integers(0, 3, 2000 + test)
        x = np.eye(3, 8, dtype=np.float32)[y]
        x += 0.3 * generator.normal(size=x.shape).astype(np.float32)
        return feature_cache.Split(
            x_train=x[:2000],
            y_train=y[:2000],
            x_test=x[2000:],
            y_test=y[2000:],
        )

    def test_learns_and_spends_its_budget(self):
        result = linear_heads.train(self.split(), SETTING, 2.0, 1e-5, seed=1)
        assert result["accuracy"] > 0.8
        assert 1.99 < result["epsilon"] <= 2.0
        assert (result["examples"], result["features"]) == (2000, 8)

    def test_seeds_draw_the_noise(self):
        first, again, other = (
            linear_heads.train(
                self.split(),
                dataclasses.replace(SETTING, steps=2),
                0.05,
                1e-5,
                s,
            )["accuracy"]
            for s in (1, 1, 2)
        )
        assert first == again != other

    def test_the_rate_is_a_multiple_of_the_rule(self):
        slow, fast = (
            linear_heads.train(
                self.split(10),
                dataclasses.replace(SETTING, steps=1, rate=rate),
                1.0,
                1e-5,
                seed=1,
            )["learning_rate"]
            for rate in (0.5, 2.0)
        )
        assert fast == pytest.approx(4 * slow)

    def test_a_simulation_is_as_accurate(self):
        """Both lose some points to the noise."""

        def simulate(split, setting, epsilon, delta, seed):
            (result,) = linear_heads.simulate(
                split, [setting], epsilon, delta, [seed]
            )
            return result

        private, simulated = (
            np.mean(
                [
                    run(self.split(), SETTING, 0.02, 1e-5, seed)["accuracy"]
                    for seed in range(4)
                ]
            )
            for run in (linear_heads.train, simulate)
        )
        assert 0.9 < private < 0.96
        assert simulated == pytest.approx(private, abs=0.02)

    def test_seeds_are_simulated_at_once(self):
        setting = dataclasses.replace(SETTING, steps=2)
        arguments = self.split(), [setting] * 3, 0.01, 1e-5
        first, again, other = linear_heads.simulate(*arguments, [1, 1, 2])
        assert first["accuracy"] == again["accuracy"] != other["accuracy"]
        assert (first["examples"], first["features"]) == (2000, 8)
        private = linear_heads.train(self.split(), setting, 0.01, 1e-5, seed=1)
        assert first["noise_multiplier"] == private["noise_multiplier"]
