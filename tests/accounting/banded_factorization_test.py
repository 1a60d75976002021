"""Coefficients of bands: their optimum, what they gain, and what they cost."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from scipy import linalg, stats

from tests.accounting.entries import POISSON, changed
from tf_dpsub import accounting
from tf_dpsub.accounting import accountants, banded_factorization


def error(coefficients, steps, momentum=0.0):
    return np.mean(
        banded_factorization.squared_errors(coefficients, steps, momentum)
    )


def matrix(coefficients, steps):
    """The banded matrix C."""
    column = np.zeros(steps)
    column[: len(coefficients)] = coefficients[:steps]
    return linalg.toeplitz(column, np.zeros(steps))


class TestCoefficients:
    @pytest.mark.parametrize(
        "steps, bands, expected",
        [
            (16, 1, 8.5),
            (64, 1, 32.5),
            (16, 2, 5.211677),
            (16, 4, 3.754024),
            (64, 4, 10.501447),
            (64, 8, 7.096762),
        ],
    )
    def test_least_error(self, steps, bands, expected):
        c = banded_factorization.coefficients(bands, steps)
        assert len(c) == bands
        assert math.hypot(*c) == pytest.approx(1, abs=1e-12)
        assert error(c, steps) == pytest.approx(expected, abs=2e-6)

    @pytest.mark.parametrize(
        "bands, expected",
        [
            (2, (0.85654, 0.516081)),
            (4, (0.794874, 0.438434, 0.329276, 0.259863)),
        ],
    )
    def test_optimum(self, bands, expected):
        c = banded_factorization.coefficients(bands, 16)
        assert c == pytest.approx(expected, abs=2e-5)

    @pytest.mark.parametrize("bands", [2, 4])
    def test_search_does_not_stall_for_many_steps(self, bands):
        """No change of a coefficient is better, and the start is far off."""
        steps = 2000
        c = np.array(banded_factorization.coefficients(bands, steps))
        best = error(c, steps)
        first = banded_factorization.first_coefficients(bands)
        assert best < 0.999 * error(first, steps)
        for k in range(1, bands):
            for factor in (0.999, 1.001):
                other = c.copy()
                other[k] *= factor
                assert error(other, steps) > best

    def test_momentum_has_coefficients_of_its_own(self):
        steps, momentum = 60, 0.9
        plain, own = (
            banded_factorization.coefficients(4, steps, m)
            for m in (0.0, momentum)
        )
        assert error(own, steps, momentum) < error(plain, steps, momentum)
        # What noise leaves in the weights, by matrices.
        accumulated = sum(
            linalg.toeplitz(momentum**k * np.eye(steps)[k], np.zeros(steps))
            for k in range(steps)
        )
        workload = np.tri(steps) @ accumulated
        left = workload @ np.linalg.inv(matrix(own, steps))
        assert banded_factorization.squared_errors(
            own, steps, momentum
        ) == pytest.approx(np.sum(left**2, 1))

    def test_more_bands_than_steps(self):
        c = banded_factorization.coefficients(5, 3)
        assert c[3:] == (0.0, 0.0)
        assert c[:3] == banded_factorization.coefficients(3, 3)

    @pytest.mark.parametrize(
        "arguments", [(0, 4), (2, 0), (2, 4, 1.0), (2, 4, -0.1), (2.5, 4)]
    )
    def test_errors(self, arguments):
        with pytest.raises(ValueError, match="Expected"):
            banded_factorization.coefficients(*arguments)


class TestFirstCoefficients:
    def test_their_square_sums_all(self):
        root = matrix(banded_factorization.first_coefficients(40), 40)
        assert np.allclose(root @ root, np.tri(40), atol=1e-12)
        assert np.linalg.inv(root)[:5, 0] == pytest.approx(
            [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128]
        )

    def test_errors_of_a_thousand_steps(self):
        c = banded_factorization.first_coefficients(1024)
        errors = banded_factorization.squared_errors(c, 1024)
        assert np.sum(c**2) == pytest.approx(3.272554, abs=1e-6)
        assert np.max(errors) == pytest.approx(10.7096, abs=1e-4)
        assert np.mean(errors) == pytest.approx(9.6708, abs=1e-4)
        assert np.sum(c[:16] ** 2) == pytest.approx(1.943879, abs=1e-6)
        identity = banded_factorization.squared_errors([1.0], 1024)
        assert (identity.max(), identity.mean()) == (1024, 512.5)


class TestBestBands:
    @pytest.mark.parametrize(
        "run, epsilon, gain",
        [
            ((10_000, 250, 1200), 2.0, 0.971),
            ((60_000, 600, 300), 8.0, 0.636),
        ],
    )
    def test_gain(self, run, epsilon, gain, monkeypatch):
        monkeypatch.setattr(banded_factorization, "CHOICES", (1, 4))
        noise = banded_factorization.noise_of_bands(*run, epsilon, 1e-5)
        assert noise[4] / noise[1] == pytest.approx(gain, abs=6e-4)
        assert accounting.best_bands(*run, epsilon, 1e-5) == 4

    def test_it_weighs_what_bands_cost(self, monkeypatch):
        """The multiplier times what is left; the search ends as it grows."""
        multipliers = {1: 1.0, 2: 1.1, 3: 9.0}
        calls = []

        def noise_multiplier(sampling_rate, steps, **_):
            calls.append((sampling_rate, steps))
            return multipliers[len(calls)]

        monkeypatch.setattr(accountants, "noise_multiplier", noise_multiplier)
        run = (1000, 10, 99, 8.0, 1e-5)
        noise = banded_factorization.noise_of_bands(*run)
        assert calls == [(0.01, 99), (0.02, 50), (0.04, 25)]
        assert noise[1] == pytest.approx(math.sqrt(50))
        left = error(banded_factorization.coefficients(2, 99), 99)
        assert noise[2] == pytest.approx(1.1 * math.sqrt(left))
        assert min(noise, key=noise.get) == 2

    def test_there_is_a_batch_for_each_group(self, monkeypatch):
        """Two batches make up all examples: four groups have none each."""
        monkeypatch.setattr(accountants, "noise_multiplier", lambda **_: 1.0)
        noise = banded_factorization.noise_of_bands(20, 10, 4, 8.0, 1e-2)
        assert set(noise) == {1, 2}
        # Nor are there more bands than steps.
        assert accounting.best_bands(20, 1, 1, 8.0, 1e-2) == 1

    @pytest.mark.parametrize(
        "arguments",
        [(0, 1, 1, 1.0, 0.1), (9, 10, 1, 1.0, 0.1), (9, 1, 1, 0.0, 0.1)],
    )
    def test_errors(self, arguments):
        with pytest.raises(ValueError, match="Expected"):
            accounting.best_bands(*arguments)


class TestEntry:
    BANDS, STEPS = 4, 1001
    ENTRY = changed(POISSON, bands=BANDS, batch_size=600, noise_multiplier=1.7)

    def test_event(self):
        entry = dataclasses.replace(self.ENTRY, steps=self.STEPS)
        sampled = dp_accounting.PoissonSampledDpEvent(
            600 * 4 / 60_000, dp_accounting.GaussianDpEvent(1.7)
        )
        assert entry.event() == dp_accounting.SelfComposedDpEvent(sampled, 251)
        unamplified = entry.event_without_amplification()
        assert unamplified == dp_accounting.SelfComposedDpEvent(
            sampled.event, 251
        )

    def test_epsilon_by_dp_accounting(self):
        ledger = accounting.PrivacyLedger()
        ledger.charge(self.ENTRY, self.STEPS)
        theirs = pld_privacy_accountant.PLDAccountant(
            dp_accounting.NeighboringRelation.REPLACE_SPECIAL, 1e-3
        )
        theirs.compose(
            dp_accounting.PoissonSampledDpEvent(
                0.04, dp_accounting.GaussianDpEvent(1.7)
            ),
            251,
        )
        assert ledger.epsilon(1e-5) == pytest.approx(
            theirs.get_epsilon(1e-5), rel=5e-3
        )

    def test_delta_by_what_is_released(self):
        """Monte Carlo of all releases, by their covariance, of a whole run."""
        sigma, rate, steps, epsilon = 1.3, 0.5, 6, 1.5
        c = matrix(banded_factorization.coefficients(2, steps), steps)
        mixing = np.linalg.inv(c)
        covariance = sigma**2 * mixing @ mixing.T
        # The example is in the group of steps 0, 2 and 4, and sums move by 1.
        patterns = np.zeros((8, steps))
        patterns[:, ::2] = (np.arange(8)[:, None] >> np.arange(3)) & 1
        weights = rate ** patterns.sum(1) * (1 - rate) ** (3 - patterns.sum(1))
        generator = np.random.default_rng(0)
        count = 100_000
        released = generator.normal(size=(count, steps)) @ (sigma * mixing.T)
        drawn = patterns[generator.choice(8, count, p=weights)]
        density = stats.multivariate_normal(np.zeros(steps), covariance)

        def ratio(y):
            """Density of the releases with the example over that without."""
            with_it = sum(
                w * density.pdf(y - p) for w, p in zip(weights, patterns)
            )
            return with_it / density.pdf(y)

        directions = {
            "removed": 1 - math.exp(epsilon) / ratio(released + drawn),
            "added": 1 - math.exp(epsilon) * ratio(released),
        }
        ledger = accounting.PrivacyLedger()
        ledger.charge(
            changed(
                POISSON,
                bands=2,
                batch_size=1,
                examples=4,
                noise_multiplier=sigma,
            ),
            steps,
        )
        claimed = ledger.delta(epsilon)
        measured, spread = max(
            (np.mean(gain), np.std(gain) / math.sqrt(count))
            for gain in (np.maximum(g, 0) for g in directions.values())
        )
        assert abs(measured - claimed) < 5 * spread + 1e-4
        assert claimed > 20 * spread

    @pytest.mark.parametrize(
        "changes",
        [
            {"bands": 0},
            {"bands": 101},
            {"sampler": "batches"},
            {"sampler": "batches", "examples": None},
        ],
    )
    def test_errors(self, changes):
        with pytest.raises(ValueError, match="Expected bands"):
            changed(self.ENTRY, **changes)


class TestLedger:
    ENTRY = TestEntry.ENTRY

    def test_text_has_bands_where_there_are_any(self):
        ledger = accounting.PrivacyLedger()
        ledger.charge(POISSON, 3)
        assert '"bands"' not in ledger.to_json()
        ledger.charge(self.ENTRY, 5)
        read = accounting.PrivacyLedger.from_json(ledger.to_json())
        assert read.entries == ledger.entries
        assert [entry.bands for entry in read.entries] == [1, 4]

    def test_each_run_begins_a_cycle(self, tmp_path):
        """Three runs of five steps have six cycles, not four."""
        ledger = accounting.PrivacyLedger(tmp_path / "ledger.json")
        for _ in range(3):
            ledger.charge(self.ENTRY, 5)
            ledger.end_entry()
        assert [entry.steps for entry in ledger.entries] == [5, 5, 5]
        assert ledger.steps == 15
        read = accounting.PrivacyLedger(tmp_path / "ledger.json")
        assert read.entries == ledger.entries
        six = accountants.composed_epsilon(
            [dp_accounting.SelfComposedDpEvent(self.ENTRY.step_event(), 6)],
            delta=1e-5,
        )
        assert read.epsilon(1e-5) == six

    def test_a_budget_is_spent_in_whole_cycles(self):
        ledger = accounting.PrivacyLedger()
        budget = {"epsilon": 1.0, "delta": 1e-5, "accountant": "rdp"}
        fitting = ledger.steps_within(self.ENTRY, **budget)
        assert fitting > 8 and fitting % 4 == 0
        ledger.charge(self.ENTRY, 5)
        assert ledger.steps_within(self.ENTRY, **budget) == fitting - 5

        def after(steps):
            return ledger.epsilon_after(
                self.ENTRY, steps, 1e-5, accountant="rdp"
            )

        assert after(3) == ledger.epsilon(1e-5, "rdp") < after(4)
        assert after(fitting - 5) <= 1.0 < after(fitting - 4)
        # Another run does not go on with the cycle.
        ledger.end_entry()
        assert ledger.steps_within(self.ENTRY, **budget) == fitting - 8

    def test_statement(self):
        ledger = accounting.PrivacyLedger()
        ledger.charge(self.ENTRY, 5)
        text = " ".join(accounting.statement(ledger, delta=1e-5).split())
        assert "with cyclic Poisson sampling" in text
        assert "the 60000 examples into 4 groups" in text
        assert "probability q = 0.04." in text
        assert "in 2 cycles of 4 steps" in text
        # Groups of equal sizes need the number of examples.
        assert "adding or removing" not in text
