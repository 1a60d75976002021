import functools
import logging
import math
import os
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import integrate, stats

from tf_dpsub import accounting
from tf_dpsub.accounting import accountants, loss_distributions

RUN = {"noise_multiplier": 1.3, "sampling_rate": 150 / 60000, "steps": 6000}
BUDGET = {"epsilon": 2.0, "delta": 1e-5}

both_accountants = pytest.mark.parametrize("accountant", ["rdp", "pld"])


def repeated(noise_multiplier, sampling_rate, steps):
    return dp_accounting.SelfComposedDpEvent(
        accountants.sampled_gaussian(noise_multiplier, sampling_rate), steps
    )


def gaussian_delta(noise_multiplier, epsilon):
    """Theorem 8 of Balle and Wang (2018), exact."""
    a = 1 / (2 * noise_multiplier)
    b = epsilon * noise_multiplier
    return stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b)


class TestEpsilon:
    @pytest.mark.parametrize(
        "noise_multiplier, sampling_rate, steps, rdp, pld",
        [
            (1.3, 150 / 60000, 6000, 0.72422, 0.64011),
            (1.0, 0.02, 500, 3.1443, 2.7735),
            # GEP: two releases with noise multiplier 2.09 see one subsample.
            (2.09 / math.sqrt(2), 0.02, 10000, 7.8525, 7.2772),
            (18.0, 0.025, 1200, 0.17096, 0.15407),
            # The user's batches: T Gaussians, or one an epoch.
            (18.0, 1, 1200, 10.2351, 9.5354),
            (18.0, 1, 30, 1.2544, 1.1496),
        ],
    )
    def test_known_figures(
        self, noise_multiplier, sampling_rate, steps, rdp, pld
    ):
        spent = functools.partial(
            accounting.epsilon,
            noise_multiplier=noise_multiplier,
            sampling_rate=sampling_rate,
            steps=steps,
            delta=1e-5,
        )
        assert spent(accountant="rdp") == pytest.approx(rdp, rel=5e-5)
        assert (
            spent() == spent(accountant="pld") == pytest.approx(pld, rel=5e-5)
        )

    def test_best_order(self):
        event = repeated(**RUN)
        assert accountants.composed_epsilon(
            [event], delta=1e-5, accountant="rdp", orders=(19.0,)
        ) == accounting.epsilon(**RUN, delta=1e-5, accountant="rdp")

    def test_orders(self):
        orders = set(accountants.RDP_ORDERS)
        assert orders.issuperset(range(64, 257))
        assert orders.issuperset(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)

    @pytest.mark.parametrize("order", [2.0, 5.0, 32.0])
    def test_sampled_gaussian_against_the_integral(self, order):
        noise_multiplier, rate, steps, delta = 1.1, 0.03, 700, 1e-6

        def integrand(x):
            log_ratio = np.log1p(
                rate * np.expm1((2 * x - 1) / (2 * noise_multiplier**2))
            )
            log_density = stats.norm.logpdf(x, scale=noise_multiplier)
            return np.exp(log_density + order * log_ratio)

        moment, _ = integrate.quad(
            integrand, -40, 80, points=[0, 1, order], limit=500, epsabs=0
        )
        divergence = steps * math.log(moment) / (order - 1)
        expected = (
            divergence
            + math.log1p(-1 / order)
            - math.log(delta * order) / (order - 1)
        )
        assert accountants.composed_epsilon(
            [repeated(noise_multiplier, rate, steps)],
            delta=delta,
            accountant="rdp",
            orders=(order,),
        ) == pytest.approx(expected, rel=1e-7)

    @pytest.mark.parametrize("noise_multiplier, steps", [(18.0, 30), (0.5, 4)])
    def test_pld_of_gaussians_is_exact(self, noise_multiplier, steps):
        epsilon = accounting.epsilon(
            noise_multiplier=noise_multiplier,
            sampling_rate=1,
            steps=steps,
            delta=1e-6,
            accountant="pld",
        )
        together = noise_multiplier / math.sqrt(steps)
        assert gaussian_delta(together, epsilon) == pytest.approx(
            1e-6, rel=1e-6
        )

    @both_accountants
    @pytest.mark.parametrize("noise_multiplier", [0, 0.0, 1e-200, 1e-7])
    def test_no_noise_is_not_private(self, accountant, noise_multiplier):
        run = {**RUN, "noise_multiplier": noise_multiplier}
        assert (
            accounting.epsilon(**run, delta=1e-5, accountant=accountant)
            == math.inf
        )
        assert (
            accounting.delta(**run, epsilon=1.0, accountant=accountant) == 1.0
        )

    @both_accountants
    def test_no_steps_cost_nothing(self, accountant):
        run = {**RUN, "steps": 0, "accountant": accountant}
        assert accounting.epsilon(**run, delta=1e-5) == 0
        assert accounting.delta(**run, epsilon=1.0) == 0

    @pytest.mark.parametrize(
        "noise_multiplier, sampling_rate, steps",
        [
            # Losses far below the interval of PLD's grid.
            (18.0, 0.0004, 10**6),
            (1000.0, 0.01, 10**9),
            # An epsilon far above the range of PLD's grid.
            (0.5, 0.5, 1000),
            (0.02, 0.01, 1000),
            (1e-5, 0.01, 3),
        ],
    )
    def test_pld_never_exceeds_rdp(
        self, noise_multiplier, sampling_rate, steps
    ):
        spent = functools.partial(
            accounting.epsilon,
            noise_multiplier=noise_multiplier,
            sampling_rate=sampling_rate,
            steps=steps,
            delta=1e-5,
        )
        assert 0 < spent(accountant="pld") <= spent(accountant="rdp")

    def test_orders_that_fail_are_silent(self, caplog):
        run = {"noise_multiplier": 0.47, "sampling_rate": 0.025, "steps": 10}
        dp_accounting.rdp.RdpAccountant().compose(repeated(**run))
        assert "failed to converge" in caplog.text
        caplog.clear()
        accounting.epsilon(**run, delta=1e-5, accountant="rdp")
        assert not caplog.records
        logging.getLogger("absl").warning("_other")
        assert len(caplog.records) == 1


class TestDelta:
    @both_accountants
    def test_inverts_epsilon(self, accountant):
        epsilon = accounting.epsilon(**RUN, delta=1e-5, accountant=accountant)
        assert accounting.delta(
            **RUN, epsilon=epsilon, accountant=accountant
        ) == pytest.approx(1e-5, rel=1e-6)

    def test_pld_of_a_gaussian(self):
        spent = accounting.delta(
            noise_multiplier=18.0,
            sampling_rate=1,
            steps=30,
            epsilon=0.9,
            accountant="pld",
        )
        exact = gaussian_delta(18 / math.sqrt(30), 0.9)
        assert exact <= spent < exact * (1 + 1e-5)


class TestComposition:
    @both_accountants
    def test_lists_nests_and_repetitions_are_one(self, accountant):
        sampled = accountants.sampled_gaussian(1.0, 0.02)
        other = accountants.sampled_gaussian(3.0, 1)
        repeat = dp_accounting.SelfComposedDpEvent
        spent = [
            accountants.composed_epsilon(
                events, delta=1e-5, accountant=accountant
            )
            for events in (
                [repeat(sampled, 30), repeat(other, 2)],
                [other, repeat(sampled, 10), other, repeat(sampled, 20)],
                [
                    repeat(
                        dp_accounting.ComposedDpEvent(
                            [other, repeat(sampled, 15)]
                        ),
                        2,
                    ),
                    dp_accounting.NoOpDpEvent(),
                ],
            )
        ]
        assert spent[1:] == pytest.approx(spent[:1] * 2, rel=1e-9)
        alone = accountants.composed_epsilon(
            [repeat(sampled, 30)], delta=1e-5, accountant=accountant
        )
        assert alone < spent[0]

    def test_gaussians_add_their_precisions(self):
        two = [repeated(3.0, 1, 1), repeated(4.0, 1, 1)]
        assert accountants.composed_epsilon(
            two, delta=1e-5, accountant="pld"
        ) == pytest.approx(
            dp_accounting.get_epsilon_gaussian(12 / 5, 1e-5), rel=1e-9
        )

    @both_accountants
    def test_one_event_that_is_not_private_spoils_all(self, accountant):
        events = [repeated(**RUN), dp_accounting.NonPrivateDpEvent()]
        assert (
            accountants.composed_epsilon(
                events, delta=1e-5, accountant=accountant
            )
            == math.inf
        )

    def test_nothing(self):
        nothing = [dp_accounting.NoOpDpEvent(), repeated(1.0, 0.1, 0)]
        assert accountants.composed_epsilon(nothing, delta=1e-5) == 0.0
        assert accountants.composed_delta(nothing, epsilon=1.0) == 0.0

    def test_event_without_a_bound(self):
        with pytest.raises(dp_accounting.UnsupportedEventError):
            accountants.composed_epsilon(
                [dp_accounting.UnsupportedDpEvent()], delta=1e-5
            )


class TestTruePositiveRate:
    @pytest.mark.parametrize("false_positive_rate", [1e-3, 1e-2, 0.1, 0.5])
    @pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
    def test_gaussian(self, mu, false_positive_rate):
        bound = accountants.true_positive_rate(
            [repeated(2 / mu, 1, 4)], false_positive_rate=false_positive_rate
        )
        best = stats.norm.cdf(mu + stats.norm.ppf(false_positive_rate))
        assert best <= bound <= 1.03 * best

    def test_sampled_gaussian_against_the_best_test(self):
        """Of one step, which compares the likelihoods of its two outcomes."""
        sigma, rate, false_positive_rate = 0.8, 0.3, 0.01
        threshold = stats.norm.isf(false_positive_rate, scale=sigma)
        best = (1 - rate) * false_positive_rate + rate * stats.norm.sf(
            threshold - 1, scale=sigma
        )
        bound = accountants.true_positive_rate(
            [repeated(sigma, rate, 1)], false_positive_rate=false_positive_rate
        )
        assert best <= bound <= 1.05 * best

    def test_nothing_and_no_noise(self):
        rates = [
            accountants.true_positive_rate(events, false_positive_rate=0.01)
            for events in ([], [dp_accounting.NonPrivateDpEvent()])
        ]
        assert rates == pytest.approx([0.01, 1.0])

    @pytest.mark.parametrize("rate", [0, 1, math.nan])
    def test_rate_out_of_range(self, rate):
        with pytest.raises(ValueError, match="false_positive_rate < 1, got"):
            accountants.true_positive_rate([], false_positive_rate=rate)


class TestBoundingAccountant:
    @pytest.mark.parametrize(
        "steps, asked, bounding",
        [
            (0, "pld", "pld"),
            (100, "pld", "pld"),
            (100, "rdp", "rdp"),
            (2 * 10**6, "pld", "rdp"),
        ],
    )
    def test_rdp_where_no_grid_fits(self, steps, asked, bounding):
        events = [repeated(1.3, 0.0025, steps)]
        assert bounding == accountants.bounding_accountant(
            events, delta=1e-5, accountant=asked
        )


class TestNoiseMultiplier:
    @pytest.mark.parametrize(
        "accountant, expected", [("rdp", 2.064), ("pld", 1.965)]
    )
    def test_gep(self, accountant, expected):
        effective = accounting.noise_multiplier(
            epsilon=8.0,
            delta=1e-5,
            sampling_rate=0.02,
            steps=10000,
            accountant=accountant,
        )
        assert math.sqrt(2) * effective == pytest.approx(expected, abs=6e-4)

    @both_accountants
    @pytest.mark.parametrize(
        "sampling_rate, epsilon", [(1, 0.05), (1, 20.0), (0.1, 2.0)]
    )
    def test_keeps_the_budget_tightly(self, accountant, sampling_rate, epsilon):
        run = {"sampling_rate": sampling_rate, "steps": 50, "delta": 1e-5}
        run["accountant"] = accountant
        noise_multiplier = accounting.noise_multiplier(epsilon=epsilon, **run)
        spent = accounting.epsilon(noise_multiplier=noise_multiplier, **run)
        assert epsilon * (1 - 1e-4) <= spent <= epsilon

    @both_accountants
    def test_budget_below_the_resolution_of_rdp(self, accountant):
        run = {"sampling_rate": 1, "steps": 1, "delta": 1e-5}
        run["accountant"] = accountant
        noise_multiplier = accounting.noise_multiplier(epsilon=1e-4, **run)
        assert (
            accounting.epsilon(noise_multiplier=noise_multiplier, **run) <= 1e-4
        )

    @both_accountants
    def test_budget_that_no_noise_keeps(self, accountant):
        with pytest.raises(ValueError, match="that some noise can keep"):
            accounting.noise_multiplier(
                epsilon=1e-9,
                delta=1e-300,
                sampling_rate=1,
                steps=10**9,
                accountant=accountant,
            )

    def test_after_what_rdp_takes_for_all(self, monkeypatch):
        """Its loose bound leaves nothing, the tight one leaves a part.

        From where the loose search ends, the tight one took a hundred steps.
        """
        tried, excess = [], accountants._excess

        def counted(*arguments):
            tried.append(arguments)
            return excess(*arguments)

        monkeypatch.setattr(accountants, "_excess", counted)
        loss_distributions._repeated.cache_clear()
        spent = [repeated(1.6, 0.2, 5)]
        by_rdp = accountants.composed_epsilon(
            spent, delta=1e-5, accountant="rdp"
        )

        def least_noise(epsilon):
            tried.clear()
            return accountants.least_noise(
                lambda sigma: repeated(sigma, 0.2, 10),
                epsilon=epsilon,
                delta=1e-5,
                spent=spent,
            )

        sigma = least_noise(2.0)
        whole = [*spent, repeated(sigma, 0.2, 10)]
        total = accountants.composed_epsilon(whole, delta=1e-5)
        assert 2.0 * (1 - 1e-4) < total <= 2.0 < by_rdp
        assert len(tried) < 30
        # What stays is composed with itself once for each grid.
        assert loss_distributions._repeated.cache_info().hits > len(tried) // 2
        assert least_noise(1.7) is None
        assert len(tried) == 3


class TestSteps:
    @both_accountants
    def test_last_one_that_fits(self, accountant):
        mechanism = {"noise_multiplier": 2.0, "sampling_rate": 0.1}
        steps = accounting.steps(**BUDGET, **mechanism, accountant=accountant)
        spent = functools.partial(
            accounting.epsilon, **mechanism, delta=1e-5, accountant=accountant
        )
        assert spent(steps=steps) <= 2.0 < spent(steps=steps + 1)
        assert steps > 10

    @both_accountants
    @pytest.mark.parametrize(
        "noise_multiplier, sampling_rate, expected",
        [(0.0, 0.1, 0), (1.0, 1, 0), (2.5, 1, 1), (1e9, 1e-6, 2**40)],
    )
    def test_limits(
        self, accountant, noise_multiplier, sampling_rate, expected
    ):
        assert (
            accounting.steps(
                **BUDGET,
                noise_multiplier=noise_multiplier,
                sampling_rate=sampling_rate,
                accountant=accountant,
            )
            == expected
        )

    @both_accountants
    def test_after_what_was_spent(self, accountant):
        event = accountants.sampled_gaussian(2.0, 0.1)
        spent = [repeated(8.0, 0.5, 6)]
        further = accountants.further_steps(
            event, **BUDGET, accountant=accountant, spent=spent
        )
        total = [
            accountants.composed_epsilon(
                [*spent, dp_accounting.SelfComposedDpEvent(event, count)],
                delta=1e-5,
                accountant=accountant,
            )
            for count in (further, further + 1)
        ]
        assert total[0] <= 2.0 < total[1]
        assert (
            0
            < further
            < accounting.steps(
                **BUDGET,
                noise_multiplier=1.1,
                sampling_rate=0.02,
                accountant=accountant,
            )
        )

    def test_nothing_fits_when_all_is_spent(self):
        event = accountants.sampled_gaussian(1.1, 0.02)
        spent = [repeated(1.0, 1, 5)]
        assert accountants.further_steps(event, **BUDGET, spent=spent) == 0


@pytest.mark.parametrize(
    "function, changes, message",
    [
        ("epsilon", {"noise_multiplier": -1}, "<= noise_multiplier < inf, got"),
        ("epsilon", {"noise_multiplier": math.inf}, "noise_multiplier < inf"),
        ("epsilon", {"noise_multiplier": math.nan}, "noise_multiplier < inf"),
        ("epsilon", {"sampling_rate": 0}, "0 < sampling_rate <= 1, got 0"),
        ("epsilon", {"sampling_rate": 1.1}, "0 < sampling_rate <= 1, got 1.1"),
        ("epsilon", {"delta": 0}, "0 < delta < 1, got 0"),
        ("epsilon", {"delta": 1.0}, "0 < delta < 1, got 1.0"),
        ("epsilon", {"steps": -1}, "whole number >= 0, got -1"),
        ("epsilon", {"steps": 1.5}, "whole number >= 0, got 1.5"),
        ("epsilon", {"accountant": "gdp"}, r"one of \('rdp', 'pld'\), got"),
        ("delta", {"epsilon": 0.0}, "0 < epsilon < inf, got 0.0"),
        ("delta", {"accountant": "gdp"}, "accountant to be one of"),
        ("noise_multiplier", {"epsilon": -1.0}, "0 < epsilon < inf, got -1"),
        ("noise_multiplier", {"epsilon": math.inf}, "epsilon < inf, got inf"),
        ("noise_multiplier", {"delta": 2.0}, "0 < delta < 1, got 2.0"),
        ("noise_multiplier", {"steps": 0}, "steps > 0, got 0"),
        ("noise_multiplier", {"sampling_rate": -0.1}, "sampling_rate <= 1"),
        ("noise_multiplier", {"accountant": None}, "accountant to be one of"),
        ("steps", {"epsilon": math.nan}, "0 < epsilon < inf, got nan"),
        ("steps", {"delta": -1.0}, "0 < delta < 1, got -1.0"),
        ("steps", {"noise_multiplier": -2}, "noise_multiplier < inf, got -2"),
        ("steps", {"accountant": "RDP"}, "accountant to be one of"),
    ],
)
def test_invalid_arguments(function, changes, message):
    arguments = {**RUN, **BUDGET}
    del arguments[function]
    with pytest.raises(ValueError, match=message):
        getattr(accounting, function)(**{**arguments, **changes})


def test_needs_no_tensorflow():
    code = "import sys, tf_dpsub.accounting; print('tensorflow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_is_there_beside_keras_on_another_backend():
    code = (
        "import keras, sys, tf_dpsub.accounting; "
        "print(keras.config.backend(), 'tf_dpsub.layers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "jax False\n"
