"""The bound on given votes, against published code and exact divergences."""

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from tf_dpsub.pate import UnpublishableEpsilon, answer_rdp, check_rdp
from tf_dpsub.pate.data_dependent import _log_other_winner

ORDERS = (2, 8, 16, 32)


# From `research/pate_2018/core.py` of TensorFlow Privacy, at noise 40.
@pytest.mark.parametrize(
    "votes, log_q, divergences",
    [
        (
            (200, 30, 20),
            -6.185839,
            (0.00054506, 0.00068104, 0.00102119, 0.00323554),
        ),
        (
            (250,) + 9 * (0,),
            -10.019228,
            (1.5270e-05, 2.0590e-05, 3.6810e-05, 2.0345e-04),
        ),
        # Too close: the bound that holds for all votes.
        ((130, 120) + 8 * (0,), -0.661519, (0.00125, 0.005, 0.01, 0.02)),
    ],
)
def test_as_published_code(votes, log_q, divergences):
    votes = np.array([votes])
    assert _log_other_winner(votes, 40)[0] == pytest.approx(log_q, abs=1e-6)
    np.testing.assert_allclose(
        answer_rdp(votes, 40, ORDERS)[0], divergences, rtol=1e-3
    )


@pytest.mark.parametrize("largest, log_p", [(250, -0.461149), (120, -1.214355)])
def test_threshold_as_published_code(largest, log_p):
    """A check is an answer with noise √2 as large, of the rarer outcome."""
    assert stats.norm.logsf((200 - largest) / 150) == pytest.approx(
        log_p, abs=1e-6
    )
    np.testing.assert_allclose(
        check_rdp(np.array([[largest, 0]]), 200, 150, ORDERS)[0],
        np.array(ORDERS) / (2 * 150**2),
    )


def outcomes(counts, noise):
    """Exact probabilities of the winner, by quadrature."""
    counts = np.asarray(counts, float)
    z = np.linspace(-12, 12, 4001) * noise

    def wins(j):
        others = np.delete(counts, j)
        density = stats.norm.pdf(z, scale=noise)
        below = stats.norm.cdf(
            (z + counts[j])[:, None] - others, scale=noise
        ).prod(1)
        return integrate.simpson(density * below, x=z)

    return np.array([wins(j) for j in range(len(counts))])


def divergence(p, q, order):
    """Exact Rényi divergence of two distributions of outcomes."""
    return special.logsumexp(order * np.log(p) - (order - 1) * np.log(q)) / (
        order - 1
    )


def neighbours(counts):
    """Counts after one vote left a class, for another one or for none."""
    for loser in np.flatnonzero(counts):
        for winner in range(len(counts) + 1):
            moved = np.append(counts, 0)
            moved[loser] -= 1
            moved[winner] += 1
            yield moved[:-1]


@pytest.mark.parametrize(
    "counts", [(30, 0, 0), (25, 4, 1), (20, 8, 2), (16, 14, 0), (30, 0)]
)
def test_no_neighbour_diverges_further(counts):
    orders, noise = (1.5, 2.0, 4.0, 9.0), 5.0
    counts = np.array(counts)
    (bound,) = answer_rdp(counts[None], noise, orders)
    exact = outcomes(counts, noise)
    assert exact.sum() == pytest.approx(1, abs=1e-6)
    assert np.log(1 - exact[0]) <= _log_other_winner(counts[None], noise) + 1e-9
    worst = [
        max(
            max(divergence(exact, other, a), divergence(other, exact, a))
            for other in (outcomes(n, noise) for n in neighbours(counts))
        )
        for a in orders
    ]
    # The theorem bounds the divergence of the votes that were cast from others.
    mine = [
        max(
            divergence(exact, outcomes(n, noise), a) for n in neighbours(counts)
        )
        for a in orders
    ]
    assert (np.array(mine) <= bound).all()
    assert (np.array(worst) <= np.array(orders) / noise**2).all()


@pytest.mark.parametrize("largest", [0, 15, 20, 30, 60])
def test_no_neighbour_of_a_check_diverges_further(largest):
    orders, noise, threshold = (1.5, 2.0, 4.0, 9.0), 4.0, 20.0
    (bound,) = check_rdp(np.array([[largest, 0]]), threshold, noise, orders)

    def passes(count):
        tails = stats.norm.sf, stats.norm.cdf
        return np.array([t((threshold - count) / noise) for t in tails])

    for other in (largest - 1, largest + 1):
        for order, most in zip(orders, bound):
            exact = divergence(passes(largest), passes(other), order)
            assert exact <= most * (1 + 1e-9)


def test_agreement_is_cheap_and_never_dearer_than_the_ledger():
    generator = np.random.default_rng(0)
    counts = generator.multinomial(250, np.ones(10) / 10, 200)
    counts[:, 0] += generator.integers(0, 10**6, 200)
    orders = np.array([1.1, 2, 10, 100, 1000])
    for rdp, most in (
        (answer_rdp(counts, 40, orders), orders / 40**2),
        (check_rdp(counts, 200, 150, orders), orders / (2 * 150**2)),
    ):
        assert np.isfinite(rdp).all() and (rdp >= 0).all()
        assert (rdp <= most * (1 + 1e-12)).all()
        assert (rdp.min(0) < most / 100).any()


@pytest.mark.parametrize(
    "counts, noise, orders, message",
    [
        ([1, 2], 1, [2], "counts of votes"),
        ([[1], [2]], 1, [2], "counts of votes"),
        ([[0.5, 2.0]], 1, [2], "counts of votes"),
        ([[1, 2]], 0, [2], "noise"),
        ([[1, 2]], math.inf, [2], "noise"),
        ([[1, 2]], 1, [1], "orders above 1"),
        ([[1, 2]], 1, 2, "orders above 1"),
    ],
)
def test_errors(counts, noise, orders, message):
    with pytest.raises(ValueError, match=message):
        answer_rdp(counts, noise, orders)
    with pytest.raises(ValueError, match=message):
        check_rdp(counts, 1, noise, orders)


def test_its_text_says_that_it_is_private():
    text = str(UnpublishableEpsilon(1.96701, 1e-5))
    assert "1.968" in text and "NOT TO BE PUBLISHED" in text
