import numpy as np
import pytest
from scipy import stats

from tf_dpsub.data import PoissonBatches

RATES = np.linspace(0.02, 0.5, 30)
STEPS = 2000


def rated(**changes):
    settings = {"batch_size": 8, "sampling_rates": RATES, "seed": 0} | changes
    return PoissonBatches(np.arange(30), **settings)


@pytest.fixture(scope="module", name="included")
def _included():
    included = np.zeros((STEPS, 30), bool)
    dataset = rated().dataset().take(STEPS)
    for step, batch in enumerate(dataset.as_numpy_iterator()):
        included[step, batch["x"][batch["real"] == 1]] = True
    return included


def test_every_example_has_its_rate(included):
    counts = included.sum(0)
    statistic = np.sum(
        (counts - STEPS * RATES) ** 2 / (STEPS * RATES * (1 - RATES))
    )
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], 30)
    assert low < statistic < high


def test_draws_are_independent(included):
    """The variance of the size of a batch is the sum of those of examples."""
    variance = included.sum(1).var() / np.sum(RATES * (1 - RATES))
    # Six standard deviations.
    assert abs(variance - 1) < 6 * np.sqrt(2 / STEPS)


def test_replicas_draw_with_the_rates_of_theirs():
    rates = np.where(np.arange(30) % 3, 1.0, 1e-12)
    batches = rated(sampling_rates=rates, batch_size=15)
    for r in range(3):
        (batch,) = batches.dataset(shard=(r, 3)).take(1)
        drawn = batch["x"].numpy()[batch["real"] == 1].tolist()
        assert drawn == [i for i in range(r, 30, 3) if i % 3]


def test_equal_rates_draw_all_that_one_rate_draws():
    seeded = [
        rated(sampling_rates=rates).dataset().take(20).as_numpy_iterator()
        for rates in (None, np.full(30, 8 / 30))
    ]
    for one, other in zip(*seeded):
        np.testing.assert_array_equal(one["x"], other["x"])


def test_what_the_ledger_needs():
    batches = rated()
    assert batches.largest_rate == 0.5
    assert batches.sampling_rate == 8 / 30
    assert any("largest sampling rate" in a for a in batches.assumptions)
    # Batches of features in place of inputs go on drawing by them.
    assert batches.with_inputs(np.zeros(30)).largest_rate == 0.5


@pytest.mark.parametrize(
    "rates, message",
    [
        (RATES[:29], r"one probability for each of 30 examples, got shape"),
        (0.1, "got shape"),
        (RATES.astype(str), "dtype <U"),
        (RATES - 0.02, "0 < sampling_rates <= 1"),
        (RATES + 0.6, "0 < sampling_rates <= 1"),
        (np.where(RATES > 0.4, np.nan, RATES), "0 < sampling_rates <= 1"),
    ],
)
def test_bad_rates(rates, message):
    with pytest.raises(ValueError, match=message):
        rated(sampling_rates=rates)


def test_warns_where_the_batch_size_is_another_one(caplog):
    rated(batch_size=1)
    assert "about 7.8 examples" in caplog.text
    caplog.clear()
    rated(batch_size=8)
    assert not caplog.text
