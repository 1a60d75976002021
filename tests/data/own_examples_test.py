"""Hosts of which each draws from examples of its own."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.data import OncePerEpoch, PoissonBatches, poisson_batches

# Of unequal size: their rows are 0 to 59.
SHARDS = [np.arange(0, 25), np.arange(25, 31), np.arange(31, 60)]
TOTAL, BATCH_SIZE = 60, 15


def of_host(rows, cls=PoissonBatches, **settings):
    arguments = {"batch_size": BATCH_SIZE, "total_examples": TOTAL, "seed": 0}
    return cls(rows.astype("float32"), rows, **{**arguments, **settings})


def drawn(dataset, steps):
    return [
        batch["y"][batch["real"] == 1].tolist()
        for batch in dataset.take(steps).as_numpy_iterator()
    ]


def bernoulli(rows, rate, uniform):
    """Rows that are drawn one after another, each by a question of its own.

    The number u that is uniform between 0 and 1 is asked at each row: is it
    below the probability that a row up to here would have been drawn? Where it
    was not for the rows before, it is with probability `rate`. A row that is
    drawn ends the questions of its number.
    """
    numbers = iter(uniform)
    u, since, chosen = next(numbers), 0, []
    for row in range(rows):
        since += 1
        if u < 1 - (1 - rate) ** since:
            chosen.append(row)
            u, since = next(numbers), 0
    return chosen


@pytest.mark.parametrize("step", range(20))
def test_each_row_is_a_question_of_its_own(step):
    """The union of hosts is one independent question for each of all rows."""
    rate, chunk = BATCH_SIZE / TOTAL, 50
    for host, rows in enumerate(SHARDS):
        key = tf.constant([host, 17], tf.int64)
        step_number = tf.constant(step, tf.int64)
        uniform = tf.random.stateless_uniform(
            [chunk], key + tf.stack([0, step_number]), dtype=tf.float64
        ).numpy()
        assert poisson_batches._draw(
            len(rows), rate, key, step_number, chunk
        ).numpy().tolist() == bernoulli(len(rows), rate, uniform)


def test_all_hosts_together_draw_one_poisson_batch():
    steps = 400
    included = np.zeros((steps, TOTAL))
    for host, rows in enumerate(SHARDS):
        batches = of_host(rows)
        assert batches.sampling_rate == BATCH_SIZE / TOTAL
        assert batches.steps_per_epoch == TOTAL / BATCH_SIZE
        assert (batches.examples, batches.own_examples) == (TOTAL, len(rows))
        dataset = batches.dataset(host=host)
        for step, some in enumerate(drawn(dataset, steps)):
            assert set(some) <= set(rows)
            included[step, some] = 1
    # Six standard deviations, of fixed draws.
    spread = np.sqrt(0.25 * 0.75 / steps)
    assert np.abs(included.mean(0) - 0.25).max() < 6 * spread
    # Pairs of rows, at one host and at two, are independent.
    both = included.T @ included / steps
    off = ~np.eye(TOTAL, dtype=bool)
    spread = np.sqrt(0.0625 * 0.9375 / steps)
    assert np.abs(both - 0.0625)[off].max() < 6 * spread
    sizes = included.sum(1)
    assert abs(sizes.var() / (TOTAL * 0.25 * 0.75) - 1) < 6 * np.sqrt(2 / steps)


def test_hosts_of_like_examples_and_seed_draw_differently():
    batches = of_host(SHARDS[0])
    first, second = (drawn(batches.dataset(host=h), 5) for h in (0, 1))
    assert first != second
    assert first == drawn(of_host(SHARDS[0]).dataset(), 5)


def test_replicas_of_a_host_share_its_examples():
    batches = of_host(SHARDS[0])
    for r in range(2):
        for some in drawn(batches.dataset(shard=(r, 2), host=1), 20):
            assert all(row % 2 == r for row in some)


def test_each_example_of_a_host_once_in_an_epoch():
    batches = of_host(SHARDS[2], OncePerEpoch)
    assert batches.sampling_rate == 1 / 4
    together = sum(drawn(batches.dataset(host=2), 4), [])
    assert sorted(together) == SHARDS[2].tolist()


def test_the_statement_says_that_examples_are_at_one_host():
    assert of_host(SHARDS[0]).assumptions == (
        "that every example is at one host alone",
    )
    assert of_host(SHARDS[0]).ledger_fields["examples"] == TOTAL


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"total_examples": 24}, "total_examples >= 25"),
        ({"total_examples": 60.0}, "total_examples"),
        ({"sampling_rates": np.full(25, 0.25)}, "no sampling_rates"),
        ({"batch_size": 61}, "batch_size <= 60"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        of_host(SHARDS[0], **settings)


def test_groups_need_all_examples():
    with pytest.raises(ValueError, match="with total_examples: groups"):
        of_host(SHARDS[0]).in_groups(2)


@pytest.mark.parametrize("host", [-1, 0.5])
def test_hosts_that_are_refused(host):
    with pytest.raises(ValueError, match="host >= 0"):
        of_host(SHARDS[0]).dataset(host=host)
