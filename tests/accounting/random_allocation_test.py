import dp_accounting
import numpy as np
import pytest
from scipy import special

from tf_dpsub import accounting
from tf_dpsub.accounting import random_allocation

REMOVED, ADDED = 0, 1
# Of two standard normal numbers: the trapezoidal rule, [1, nodes] and [nodes].
NODES = np.linspace(-11, 11, 1101)
DENSITY = np.exp(-(NODES**2) / 2) / np.sqrt(2 * np.pi) * (NODES[1] - NODES[0])


def ratio_of_two(first_scale, second_scale):
    """dP/dQ of two steps, [nodes, nodes], and its probabilities under Q."""
    first = np.exp(first_scale * NODES - first_scale**2 / 2)[:, None]
    second = np.exp(second_scale * NODES - second_scale**2 / 2)
    return (first + second) / 2, np.outer(DENSITY, DENSITY)


def deltas(ratio, masses, epsilon):
    """Hockey-stick divergences of P from Q and of Q from P."""
    factor = np.exp(epsilon)
    return (
        np.sum(masses * np.maximum(ratio - factor, 0)),
        np.sum(masses * np.maximum(1 - factor * ratio, 0)),
    )


def bounds(losses, epsilon):
    return (
        losses._pmf_remove.get_delta_for_epsilon(epsilon),
        losses._pmf_add.get_delta_for_epsilon(epsilon),
    )


@pytest.mark.parametrize(
    "steps, noise_multiplier, expected",
    [
        (10, 1.0, {2: 0.15856508, 3: 0.2518375, 8: 1.7075413, 32: 13.69741491}),
        (40, 4.0, {2: 0.00161106, 8: 0.00644556, 32: 0.02580411}),
        (100, 1.0, {2: 0.01703686, 8: 0.07651002}),
    ],
)
def test_divergences_are_the_known_ones(steps, noise_multiplier, expected):
    removed, added = random_allocation.divergences(
        noise_multiplier, steps, list(expected)
    )
    assert removed == pytest.approx(list(expected.values()), rel=2e-6)
    assert np.all(added < removed)
    closed_form = np.log1p(np.expm1(noise_multiplier**-2) / steps)
    assert removed[0] == pytest.approx(closed_form, rel=1e-9)


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.3, 5.0])
def test_divergences_of_one_step_are_those_of_a_gaussian(noise_multiplier):
    orders = np.array([1.5, 2, 7, 7.5, 64, 256, 1024])
    gaussian = orders / (2 * noise_multiplier**2)
    for found in random_allocation.divergences(noise_multiplier, 1, orders):
        np.testing.assert_allclose(found, gaussian, rtol=1e-9)


def test_divergences_of_two_steps_are_integrals():
    orders = np.arange(2, 7)
    ratio, masses = ratio_of_two(0.8, 0.8)
    found = random_allocation.divergences(1 / 0.8, 2, orders)
    for place, order in enumerate(orders):
        for direction, exponent in ((REMOVED, order), (ADDED, 1 - order)):
            integral = np.log(np.sum(masses * ratio**exponent)) / (order - 1)
            assert found[direction, place] == pytest.approx(integral, rel=1e-8)


def test_divergences_between_whole_orders_bound_the_integrals():
    orders = np.array([1.1, 1.7, 2.5, 4.4])
    ratio, masses = ratio_of_two(0.5, 0.5)
    found = random_allocation.divergences(2.0, 2, orders)
    for place, order in enumerate(orders):
        for direction, exponent in ((REMOVED, order), (ADDED, 1 - order)):
            integral = np.log(np.sum(masses * ratio**exponent)) / (order - 1)
            assert integral <= found[direction, place] <= 1.9 * integral


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.3, 20.0])
def test_losses_of_one_step_are_those_of_a_gaussian(noise_multiplier):
    losses = random_allocation.losses(noise_multiplier, 1, 1e-4)
    for delta in (1e-2, 1e-5, 1e-10):
        exact = dp_accounting.get_epsilon_gaussian(noise_multiplier, delta)
        found = losses.get_epsilon_for_delta(delta)
        assert exact <= found <= exact * 1.002 + 1e-6


@pytest.mark.parametrize("scale", [0.25, 1.0, 1.6])
def test_losses_of_two_steps_bound_integrals_closely(scale):
    losses = random_allocation.losses(1 / scale, 2, 1e-4)
    ratio, masses = ratio_of_two(scale, scale)
    for epsilon in (0.0, 0.1 * scale, scale, 2 * scale):
        for exact, bound in zip(
            deltas(ratio, masses, epsilon), bounds(losses, epsilon)
        ):
            # The integral has an error as well.
            assert exact <= bound * (1 + 1e-4) + 1e-15
            assert bound <= exact * 1.02 + 1e-12


def test_bounds_gradients_that_follow_earlier_steps():
    scale = 0.9
    losses = random_allocation.losses(1 / scale, 2, 1e-4)
    # Shorter gradients in the second step, by the noise of the first.
    rules = [
        np.where(NODES > 0, scale, 0.0)[:, None],
        np.where(NODES > 0.5, 0.3 * scale, scale)[:, None],
        scale / (1 + np.exp(3 * NODES))[:, None],
    ]
    for rule in rules:
        first = np.exp(scale * NODES - scale**2 / 2)[:, None]
        ratio = (first + np.exp(rule * NODES - rule**2 / 2)) / 2
        for epsilon in (0.05, 0.4, 1.0):
            for exact, bound in zip(
                deltas(ratio, np.outer(DENSITY, DENSITY), epsilon),
                bounds(losses, epsilon),
            ):
                assert exact <= bound + 1e-9


def test_agrees_with_monte_carlo_in_both_directions():
    steps, epochs, noise_multiplier, runs = 10, 5, 1.5, 40_000
    generator = np.random.default_rng(0)
    losses = random_allocation.losses(noise_multiplier, steps, 1e-4)
    losses = losses.self_compose(epochs)
    noise = generator.standard_normal([runs, epochs, steps])
    for direction in (REMOVED, ADDED):
        taken = noise.copy()
        if direction == REMOVED:
            taken[..., 0] += 1 / noise_multiplier
        ratios = taken / noise_multiplier - 0.5 / noise_multiplier**2
        loss = special.logsumexp(ratios, axis=2) - np.log(steps)
        loss = loss.sum(1) * (1 if direction == REMOVED else -1)
        for epsilon in (0.2, 0.8):
            sample = np.maximum(-np.expm1(epsilon - loss), 0)
            error = sample.std() / np.sqrt(runs)
            bound = bounds(losses, epsilon)[direction]
            assert abs(sample.mean() - bound) < 5 * error


def interval_of_mean(sample):
    """Bounds of a mean, of six deviations of the mean of a sample."""
    count = len(sample)
    # No outcome counts for more than a thousandth: the mean is Gaussian.
    assert sample.max() < 1e-3 * count * sample.mean()
    reach = 6 * sample.std() / np.sqrt(count)
    return sample.mean() - reach, sample.mean() + reach


@pytest.mark.parametrize("direction", [REMOVED, ADDED])
def test_agrees_with_tilted_sampling_at_a_small_delta(direction):
    """By outcomes that decide, weighted by how much rarer they are under Q."""
    steps, delta = 10, 1e-5
    losses = random_allocation.losses(1.0, steps, 1e-4)
    outcomes = np.random.default_rng(0).standard_normal([200_000, steps])
    if direction == REMOVED:
        epsilon = losses._pmf_remove.get_epsilon_for_delta(delta)
        # One step has a much larger number than usual.
        tilt = epsilon + np.log(steps)
        outcomes[:, 0] += tilt
        rarer = np.exp(outcomes * tilt - tilt**2 / 2).mean(1)
    else:
        epsilon = losses._pmf_add.get_epsilon_for_delta(delta)
        # All of them have smaller ones.
        tilt = epsilon
        outcomes -= tilt
        rarer = np.exp(-tilt * outcomes.sum(1) - steps * tilt**2 / 2)
    ratio = np.exp(outcomes - 0.5).mean(1)
    excess = ratio - np.exp(epsilon), 1 - np.exp(epsilon) * ratio
    low, high = interval_of_mean(np.maximum(excess[direction], 0) / rarer)
    # It bounds the divergence, by little.
    assert low < delta < 1.03 * high
    assert high < 1.12 * low


@pytest.mark.parametrize("epochs", [2, 3])
def test_what_rounding_takes_between_epochs_is_added(epochs):
    """Compared with convolutions without Fourier transforms."""
    single = random_allocation.losses(4.0, 40, 2e-3)
    composed = random_allocation.losses(4.0, 40, 2e-3, epochs=epochs)
    without = single.self_compose(epochs)
    for direction in ("_pmf_remove", "_pmf_add"):
        losses = getattr(single, direction)
        masses = losses._probs.astype(np.longdouble)
        exact = masses
        for _ in range(epochs - 1):
            exact = np.convolve(exact, masses)
        lowest = losses._lower_loss * epochs
        at = (lowest + np.arange(len(exact))) * 2e-3
        bound = random_allocation._rounding(losses._probs, epochs)
        assert 0 < bound < 1e-11
        for epsilon in (0.0, 0.1, 0.3, 0.6):
            lost = np.maximum(-np.expm1(epsilon - at), 0)
            expected = float(np.sum(exact * lost))
            found = getattr(composed, direction).get_delta_for_epsilon(epsilon)
            rounded = getattr(without, direction).get_delta_for_epsilon(epsilon)
            assert expected <= found
            assert abs(found - rounded - bound) < 1e-15 + 1e-3 * bound


def test_fewer_points_bound_more_loosely():
    few, some, many = (
        random_allocation.losses(0.8, 30, 1e-4, points)
        for points in (60, 150, 400)
    )
    for epsilon in (0.05, 0.3, 1.0):
        for loose, middle, close in zip(
            *(bounds(losses, epsilon) for losses in (few, some, many))
        ):
            assert loose > middle > close


def test_epsilon_of_the_running_example():
    run = dict(
        noise_multiplier=4.0, sampling_rate=0.025, steps=1200, delta=1e-5
    )
    once = accounting.epsilon(**run, sampling="once_per_epoch")
    # By 1,500 points it is 0.80489.
    assert 0.80485 < once < 0.8055
    assert once < accounting.epsilon(**run) < 0.817
    by_rdp = accounting.epsilon(
        **run, sampling="once_per_epoch", accountant="rdp"
    )
    assert by_rdp == pytest.approx(0.8806, abs=1e-4)


def test_quotes_the_larger_direction():
    losses = random_allocation.losses(0.6, 100, 1e-3, 100)
    removed = losses._pmf_remove.get_epsilon_for_delta(1e-5)
    added = losses._pmf_add.get_epsilon_for_delta(1e-5)
    assert losses.get_epsilon_for_delta(1e-5) == removed > 2 * added


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_solves_for_noise_and_steps(accountant):
    run = dict(
        sampling_rate=0.25,
        delta=1e-6,
        accountant=accountant,
        sampling="once_per_epoch",
    )
    sigma = accounting.noise_multiplier(epsilon=3.0, steps=12, **run)
    spent = accounting.epsilon(noise_multiplier=sigma, steps=12, **run)
    assert 3 * (1 - 1e-4) < spent <= 3
    assert accounting.steps(epsilon=3.0, noise_multiplier=sigma, **run) == 12
    delta = run.pop("delta")
    assert (
        0.99 * delta
        < accounting.delta(
            noise_multiplier=sigma, steps=12, epsilon=spent, **run
        )
        <= delta * (1 + 1e-6)
    )


def test_an_epoch_that_has_begun_counts_whole():
    run = dict(noise_multiplier=2.0, sampling_rate=0.3, delta=1e-5)
    spent = [
        accounting.epsilon(**run, steps=steps, sampling="once_per_epoch")
        for steps in (0, 1, 4, 5)
    ]
    assert 0 == spent[0] < spent[1] == spent[2] < spent[3]


def test_little_noise_counts_as_a_gaussian():
    event = random_allocation.event(0.01, 40)
    assert event == dp_accounting.GaussianDpEvent(0.01)
    assert random_allocation.event(2.0, 1) == dp_accounting.GaussianDpEvent(2.0)
    assert random_allocation.event(0.0, 9) == dp_accounting.NonPrivateDpEvent()


@pytest.mark.parametrize("noise_multiplier", [1e3, 1e5, 1e12])
@pytest.mark.parametrize("steps", [2, 10_000])
def test_much_noise_is_cheap_and_never_free(noise_multiplier, steps):
    event = random_allocation.event(noise_multiplier, steps)
    removed, added = random_allocation.divergences(
        event.noise_multiplier, steps, [2.0, 8.0, 64.0]
    )
    exact = np.log1p(np.expm1(event.noise_multiplier**-2) / steps)
    for found in (removed, added):
        assert np.all(found > 0.99 * exact)
        assert np.all(found < 64 / event.noise_multiplier**2 + 1e-9)
    losses = random_allocation.losses(event.noise_multiplier, steps, 1e-4)
    assert 0 < losses.get_delta_for_epsilon(0.0) < 1 / event.noise_multiplier
    # Within a step of the grid.
    spent = losses.get_epsilon_for_delta(1e-6)
    assert spent < 6 / event.noise_multiplier + 1e-4


@pytest.mark.parametrize("noise_multiplier", [0.051, 0.26])
def test_hardly_any_noise_hides_little(noise_multiplier):
    losses = random_allocation.losses(noise_multiplier, 10, 1e-2, 200)
    gaussian = dp_accounting.get_epsilon_gaussian(noise_multiplier, 1e-5)
    found = losses.get_epsilon_for_delta(1e-5)
    assert 0.8 * gaussian < found < 1.05 * gaussian


def test_refuses_what_is_out_of_range():
    run = dict(noise_multiplier=2.0, sampling_rate=0.3, delta=1e-5, steps=4)
    with pytest.raises(ValueError, match="Expected sampling"):
        accounting.epsilon(**run, sampling="shuffled")
    with pytest.raises(ValueError, match="Expected steps"):
        random_allocation.event(1.0, 0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        random_allocation.event(-1.0, 4)
