import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_dpsub.data import OncePerEpoch

EXAMPLES, STEPS, EPOCHS = 30, 5, 800


def batches_of(n=EXAMPLES, batch_size=6, seed=0, **arguments):
    """Batches whose target is the index of the example."""
    x = np.random.default_rng(1).normal(size=(n, 2)).astype("float32")
    return OncePerEpoch(
        x, np.arange(n), batch_size=batch_size, seed=seed, **arguments
    )


def drawn_indices(dataset, steps):
    """Indices of the drawn rows of each step."""
    return [
        batch["y"][batch["real"] == 1].tolist()
        for batch in dataset.take(steps).as_numpy_iterator()
    ]


@pytest.fixture(scope="module")
def chosen():
    """The step that each example (columns) has in each epoch (rows)."""
    drawn = drawn_indices(batches_of().dataset(), EPOCHS * STEPS)
    chosen = np.full((EPOCHS, EXAMPLES), -1)
    for place, indices in enumerate(drawn):
        epoch, step = divmod(place, STEPS)
        # None is drawn twice in an epoch, and each is drawn.
        assert (chosen[epoch, indices] == -1).all()
        assert len(set(indices)) == len(indices)
        chosen[epoch, indices] = step
    assert (chosen >= 0).all()
    return chosen


def assert_uniform(counts, total):
    """Chi-square test; the seed is fixed, and chance fails one in 1e4."""
    expected = total / counts.size
    statistic = np.sum((counts - expected) ** 2 / expected)
    assert statistic < stats.chi2.ppf(1 - 1e-4, counts.size - 1)


def test_each_example_chooses_uniformly(chosen):
    for example in (0, 11, 29):
        counts = np.bincount(chosen[:, example], minlength=STEPS)
        assert_uniform(counts, EPOCHS)
    assert_uniform(np.bincount(chosen.ravel(), minlength=STEPS), chosen.size)


def test_two_examples_choose_independently(chosen):
    for a, b in ((0, 1), (3, 17)):
        pairs = chosen[:, a] * STEPS + chosen[:, b]
        assert_uniform(np.bincount(pairs, minlength=STEPS**2), EPOCHS)
    together = (chosen[:, :, None] == chosen[:, None, :]).mean(0)
    together = together[~np.eye(EXAMPLES, dtype=bool)]
    # Batches of one size would make this (6 - 1) / (30 - 1) = 0.172.
    assert together.mean() == pytest.approx(1 / STEPS, abs=3e-3)


def test_epochs_choose_independently(chosen):
    pairs = (chosen[1:] * STEPS + chosen[:-1]).ravel()
    assert_uniform(np.bincount(pairs, minlength=STEPS**2), pairs.size)


def test_batch_sizes_are_binomial(chosen):
    sizes = (chosen == 2).sum(1)
    assert sizes.var() == pytest.approx(EXAMPLES * 0.2 * 0.8, rel=0.2)
    assert len(set(sizes)) > 6


def test_each_iterator_chooses_anew():
    dataset = batches_of().dataset()
    assert drawn_indices(dataset, STEPS) != drawn_indices(dataset, STEPS)
    one, other = (
        drawn_indices(batches_of(seed=seed).dataset(), STEPS)
        for seed in (None, None)
    )
    assert one != other
    assert one != drawn_indices(batches_of().dataset(), STEPS)


def test_a_seed_gives_the_same_draws():
    one, other = (
        drawn_indices(batches_of(seed=3).dataset(), 2 * STEPS) for _ in range(2)
    )
    assert one == other


def test_replicas_share_the_examples_of_each_epoch():
    batches = batches_of()
    shards = [
        drawn_indices(batches.dataset(shard=(r, 3)), 4 * STEPS)
        for r in range(3)
    ]
    for r, shard in enumerate(shards):
        assert all(i % 3 == r for indices in shard for i in indices)
    for epoch in range(4):
        of_epoch = [
            i
            for shard in shards
            for indices in shard[epoch * STEPS : (epoch + 1) * STEPS]
            for i in indices
        ]
        assert sorted(of_epoch) == list(range(EXAMPLES))
    # They do not choose alike.
    steps = [np.argsort(np.concatenate(shard[:STEPS])) for shard in shards]
    assert not (steps[0] == steps[1]).all()


def test_is_padded_and_never_cut():
    batches = batches_of(n=200, batch_size=4)
    assert batches.steps_per_epoch == 50
    assert batches.sampling_rate == 1 / 50
    capacity = batches.capacity(multiple_of=8)
    drawn = 0
    for batch in batches.dataset(multiple_of=8).take(50):
        rows = len(batch["real"])
        assert rows % capacity == 0
        drawn += int(tf.reduce_sum(batch["real"]))
        assert not batch["x"][batch["real"] == 0].numpy().any()
    assert drawn == 200


def test_the_last_step_is_chosen_as_often_as_the_others():
    """10 examples in batches of 4 are 3 steps of a third, not 4, 4 and 2."""
    batches = batches_of(n=10, batch_size=4)
    assert batches.steps_per_epoch == 3
    drawn = drawn_indices(batches.dataset(), 3 * 400)
    counts = np.array([sum(map(len, drawn[step::3])) for step in range(3)])
    assert_uniform(counts, 4000)


def test_other_inputs_and_maps_keep_the_sampler():
    batches = batches_of().with_inputs(np.zeros((EXAMPLES, 7)))
    assert isinstance(batches, OncePerEpoch)
    viewed = batches.with_views(np.zeros((EXAMPLES, 2, 7)), None, None, views=2)
    assert isinstance(viewed, OncePerEpoch)
    assert viewed.ledger_fields == {
        "sampler": "allocation",
        "examples": EXAMPLES,
        "each_example_once_per_epoch": True,
        "epoch_steps": STEPS,
        "unit": "example",
    }

    def noisy(x, y, seed):
        return x + tf.random.stateless_uniform([2], seed), y

    mapped = batches_of(map=noisy)
    batches = list(mapped.dataset().take(2 * STEPS).as_numpy_iterator())
    drawn = sorted(
        int(i) for b in batches[:STEPS] for i in b["y"][b["real"] == 1]
    )
    assert drawn == list(range(EXAMPLES))
    # An example is not mapped twice alike.
    rows = [
        tuple(row) for b in batches for row in b["x"][b["real"] == 1].tolist()
    ]
    assert len(set(rows)) == 2 * EXAMPLES


def test_one_step_draws_everything():
    batches = batches_of(n=5, batch_size=5)
    assert drawn_indices(batches.dataset(), 3) == [list(range(5))] * 3


class Source(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.full([4, 2], index, "float32"), np.arange(4) + 4 * index


def test_takes_what_poisson_batches_take():
    batches = OncePerEpoch(Source(), batch_size=5)
    assert batches.examples == 12
    drawn = drawn_indices(batches.dataset(), math.ceil(12 / 5))
    assert sorted(sum(drawn, [])) == list(range(12))
    with pytest.raises(ValueError, match="batch_size <= 12"):
        OncePerEpoch(Source(), batch_size=13)
