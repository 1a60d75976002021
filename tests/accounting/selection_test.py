import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from scipy import special

import tf_dpsub
from tests.accounting.entries import BATCHES, POISSON, changed
from tf_dpsub.accounting import PrivacyLedger, accountants, selection
from tf_dpsub.accounting.selection import draw_trials, selection_event

RUNNING = {"noise_multiplier": 4.0, "sampling_rate": 0.025, "steps": 1200}
SEARCH = changed(
    POISSON,
    mechanism="PrivateRandomSearch",
    steps=1,
    trial=(
        changed(POISSON, steps=400, epochs=1),
        changed(BATCHES, mechanism="PrivateValidation", examples=300, steps=2),
    ),
    mean_trials=30.0,
)


def _probabilities(mean, shape, count=200_000):
    """Those of 1, ..., count, by bisection on the odds of one more."""
    numbers = np.arange(1, count + 1)
    logs = special.gammaln(numbers + shape) - special.gammaln(numbers + 1)
    low, high = 1e-9, 1.0
    for _ in range(80):
        gamma = math.sqrt(low * high)
        weights = np.exp(logs + numbers * math.log1p(-gamma))
        weights /= weights.sum()
        if weights @ numbers > mean:
            low = gamma
        else:
            high = gamma
    return gamma, weights


@pytest.mark.parametrize(
    ("mean", "logarithmic", "geometric", "composed"),
    [
        (3, 1.360, 1.559, 1.619),
        (10, 1.585, 1.915, 3.145),
        (30, 1.746, 2.174, 5.879),
        (100, 1.897, 2.421, 12.065),
    ],
)
def test_known_epsilons(mean, logarithmic, geometric, composed):
    for distribution, expected in (
        ("logarithmic", logarithmic),
        ("geometric", geometric),
    ):
        assert tf_dpsub.accounting.selection_epsilon(
            **RUNNING,
            mean_trials=mean,
            delta=1e-5,
            distribution=distribution,
        ) == pytest.approx(expected, abs=6e-4)
    settings = {**RUNNING, "steps": mean * RUNNING["steps"]}
    assert tf_dpsub.accounting.epsilon(
        **settings, delta=1e-5, accountant="rdp"
    ) == pytest.approx(composed, abs=6e-4)


@pytest.mark.parametrize("shape", (0.0, 1.0, 0.5))
def test_probability_that_no_trial_is_above_a_level(shape):
    _, weights = _probabilities(30.0, shape)
    numbers = np.arange(1, len(weights) + 1)
    for level in (0.0, 0.3, 0.99, 1.0):
        np.testing.assert_allclose(
            selection.probability_of_none_above(level, 30.0, shape),
            weights @ level**numbers,
            rtol=1e-6,
        )
    with pytest.raises(ValueError, match="Expected 0 <= level <= 1"):
        selection.probability_of_none_above(1.1, 30.0, shape)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
def test_epsilon_is_that_of_the_theorem(shape):
    """Theorem 2, with its own expectation and a Gaussian's divergence."""
    mean, sigma, delta = 10.0, 3.0, 1e-5
    gamma, _ = _probabilities(mean, shape)
    orders = np.array(accountants.RDP_ORDERS)
    trial = orders / (2 * sigma**2)
    least = np.min((1 - 1 / orders) * trial - math.log(gamma) / orders)
    curve = trial + (1 + shape) * least + math.log(mean) / (orders - 1)
    curve = np.where(orders > 1, curve, np.inf)
    # Canonne, Kamath and Steinke, Proposition 12.
    expected = np.min(
        curve + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    )
    event = selection_event([dp_accounting.GaussianDpEvent(sigma)], mean, shape)
    assert accountants.composed_epsilon([event], delta=delta) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 2.0])
def test_numbers_of_trials_have_their_distribution(shape):
    mean, draws = 6.0, 4000
    _, probabilities = _probabilities(mean, shape)
    # All quantiles alike: nothing is left to chance.
    uniform = iter((np.arange(draws) + 0.5) / draws)
    counts = np.array(
        [draw_trials(mean, shape, lambda: next(uniform)) for _ in range(draws)]
    )
    for k in range(1, 12):
        share = np.mean(counts == k)
        assert share == pytest.approx(probabilities[k - 1], abs=2 / draws)
    assert counts.mean() == pytest.approx(mean, rel=0.02)


def test_draws_are_random():
    assert len({draw_trials(1e3, 1.0) for _ in range(9)}) > 1


def test_pld_falls_back_to_rdp_for_all():
    event = selection_event([POISSON.step_event()], 3.0, 0.0)
    events = [event, dp_accounting.GaussianDpEvent(5.0)]
    by_both = [
        accountants.composed_epsilon(events, delta=1e-5, accountant=accountant)
        for accountant in ("rdp", "pld")
    ]
    assert by_both[0] == by_both[1] > 0
    quoted = accountants.bounding_accountant(
        events, delta=1e-5, accountant="pld"
    )
    assert quoted == "rdp"
    assert hash(event)


def test_without_noise_nothing_is_private():
    event = changed(SEARCH, trial=(changed(POISSON, noise_multiplier=0.0),))
    event = changed(event, trial=(changed(event.trial[0], steps=3),)).event()
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)


@pytest.mark.parametrize("mean", [1.0, 0.5, math.inf, math.nan])
def test_refuses_a_mean(mean):
    with pytest.raises(ValueError, match="1 < mean_trials < inf"):
        selection_event([], mean, 0.0)


def test_refuses_other_distributions():
    with pytest.raises(ValueError, match="Did you mean 'geometric'"):
        selection.shape_of("geometrical")
    with pytest.raises(ValueError, match="shape"):
        draw_trials(3.0, -1.0)
    with pytest.raises(ValueError, match="without a trial"):
        changed(POISSON, mean_trials=3.0)


def test_the_ledger_holds_a_search(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.json")
    ledger.add("a", SEARCH)
    ledger.add("a", changed(SEARCH, notes=("the words of a layer",)))
    assert [entry.notes for entry in ledger.entries] == [
        ("the words of a layer",)
    ]
    once = ledger.epsilon(1e-5)
    trial = dp_accounting.ComposedDpEvent(
        tuple(entry.event() for entry in SEARCH.trial)
    )
    accountant = dp_accounting.rdp.RdpAccountant(accountants.RDP_ORDERS)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, 30.0, 0.0))
    assert once == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, 30.0, 0.0))
    ledger.add("b", ledger.entries[0])
    assert ledger.epsilon(1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-9
    )
    read = PrivacyLedger(tmp_path / "ledger.json")
    assert read.entries == ledger.entries
    assert read.entries[0].steps == 2
    assert read.entries[0].steps_of_optimizer == 800
    with pytest.raises(ValueError, match="describe the same steps alike"):
        read.add("a", changed(SEARCH, mean_trials=3.0))


def test_a_ledger_without_a_search_is_as_before():
    ledger = PrivacyLedger()
    ledger.charge(POISSON)
    assert "trial" not in ledger.to_json()


def test_the_statement_says_what_must_stay_secret():
    ledger = PrivacyLedger()
    ledger.add("a", SEARCH)
    words = tf_dpsub.accounting.statement(ledger, delta=1e-5)
    words = " ".join(words.split())
    assert "30 expected (logarithmic distribution)" in words
    assert "400 steps with noise multiplier" in words
    assert "2 releases of metrics of 300 rows" in words
    assert "their number, the time" in words


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
def test_divergences_are_those_of_dp_accounting(shape):
    trial = accountants.sampled_gaussian(2.0, 0.1)
    event = selection.selection_event([trial], 30.0, shape)
    library = dp_accounting.rdp.RdpAccountant(accountants.RDP_ORDERS)
    library.compose(event)
    found = accountants.composed_epsilon([event], delta=1e-5, accountant="rdp")
    assert found == pytest.approx(library.get_epsilon(1e-5), rel=1e-9)
