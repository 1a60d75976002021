"""Rows of data sets of other kinds."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data.mixing import Mixing
from tests.training.plain_models import X, Y, dpsgd, linear, private
from tf_dpsub.data import PoissonBatches, overlap

N = len(X)


class OneByOne:
    """A data set like those of PyTorch, without arrays of indices."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        row = int(self.names[index])
        return X[row], row


class Batches(keras.utils.PyDataset):
    def __init__(self, size=6):
        super().__init__()
        self.size = size

    def __len__(self):
        return -(-N // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return X[rows], np.arange(N)[rows]


SOURCES = {
    "one_by_one": lambda: OneByOne([str(i) for i in range(N)]),
    "py_dataset": Batches,
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(
        (X, np.arange(N))
    ).map(lambda x, y: (x, y)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_that_rows_are_independent_is_an_assumption(kind):
    (assumption,) = PoissonBatches(SOURCES[kind](), batch_size=4).assumptions
    expected = "from another" if kind == "py_dataset" else Mixing.assumed
    assert expected in assumption


@pytest.mark.parametrize("kind", SOURCES)
def test_rows(kind):
    sampler = PoissonBatches(SOURCES[kind](), batch_size=15, seed=0)
    assert sampler.examples == N
    (batch,) = sampler.dataset().take(1).as_numpy_iterator()
    drawn = batch["y"][batch["real"] == 1]
    assert len(set(drawn)) == len(drawn) > 5
    np.testing.assert_array_equal(batch["x"][batch["real"] == 1], X[drawn])


def test_fit_draws_from_a_py_dataset():
    class Labelled(Batches):
        def __getitem__(self, index):
            x, rows = super().__getitem__(index)
            return x, Y[rows]

    model = private(linear(), dpsgd())
    model.fit(Labelled(), verbose=0)
    (entry,) = model.ledger.entries
    assert (entry.sampler, entry.examples, model.ledger.steps) == (
        "poisson",
        N,
        5,
    )
    assert "PyDataset" in model.privacy_statement(1e-5)


def test_errors_of_a_source_are_its_own():
    class Broken:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise KeyError("no such row")

    with pytest.raises(KeyError, match="no such row"):
        PoissonBatches(Broken(), batch_size=1)


def test_batches_that_change():
    source = Batches()
    sampler = PoissonBatches(source, batch_size=15, seed=0)
    source.size = 5
    with pytest.raises(tf.errors.InvalidArgumentError, match="batches of 6"):
        list(sampler.dataset().take(1))


@pytest.mark.parametrize(
    "dataset, message",
    [
        (tf.data.Dataset.range(4).repeat(), "Do not repeat it"),
        (
            tf.data.Dataset.range(4)
            .filter(lambda x: True)
            .apply(tf.data.experimental.assert_cardinality(4)),
            "by index.*__getitem__",
        ),
    ],
    ids=["endless", "in_order_alone"],
)
def test_datasets_without_rows(dataset, message):
    with pytest.raises(ValueError, match=message):
        PoissonBatches(dataset, batch_size=1)


@pytest.mark.parametrize(
    "mix",
    [
        lambda rows: rows - rows.mean(0),
        lambda rows: rows / np.abs(rows).max(),
        lambda rows: (rows, np.roll(rows, 1, 0)),
        lambda rows: {"a": rows, "b": np.full(len(rows), len(rows))},
    ],
    ids=["mean", "largest", "targets", "number"],
)
def test_a_source_that_mixes_rows_is_refused(mix):
    with pytest.raises(ValueError, match="for 0 alone than among others"):
        PoissonBatches(Mixing(mix), batch_size=2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda rows: rows,
        # Products of matrices round so, for other numbers of rows.
        lambda rows: (rows * (1 + 1e-9 * len(rows))).astype("float32"),
        lambda rows: np.where(rows > 1, np.nan, rows),
        # Nothing can be compared.
        lambda rows: rows + np.random.default_rng().normal(size=rows.shape),
    ],
    ids=["itself", "rounded", "NaN", "augmented"],
)
def test_other_sources_are_taken_and_their_assumption_stated(mix):
    (assumption,) = PoissonBatches(Mixing(mix), batch_size=2).assumptions
    assert Mixing.assumed in assumption


def test_inputs_of_a_source_can_be_compared():
    source = Mixing(lambda rows: (rows, rows[:, 0]))
    batches = PoissonBatches(source, batch_size=2)
    rows = source[np.arange(9)][0]
    for part, common in ((rows[:4], 4), (rows + 1, 0)):
        count = overlap.count_common(part, batches.comparable_inputs)
        assert count == common


@pytest.mark.parametrize("rows", [1, 2])
def test_how_many_were_drawn_is_in_no_message(rows):
    class Odd:
        shape = (1000, 3)

        def __len__(self):
            return 1000

        def __getitem__(self, indices):
            if np.size(indices) < 100:
                return np.zeros((*np.shape(indices), 3), "float32")
            return np.zeros((rows * np.size(indices), 2), "float32")

    sampler = PoissonBatches(Odd(), batch_size=900, seed=0)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        next(iter(sampler.dataset()))
    message = str(raised.value).split("ValueError: ")[1].splitlines()[0]
    assert message.startswith("Expected " + ("rows", "a row")[rows - 1])
    assert not any(str(drawn) in message for drawn in range(100, 1001))
