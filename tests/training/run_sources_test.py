"""Runs on sources that change, that cannot be read, or that are parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import X, Y, dpsgd, linear, loss, private
from tf_dpsub import accounting
from tf_dpsub.data import PoissonBatches
from tf_dpsub.training import workers


class Source:
    """Rows of the shared data, which may change between epochs."""

    def __init__(self):
        self.rows, self.is_broken = len(X), False

    def __len__(self):
        return self.rows

    def __getitem__(self, indices):
        if self.is_broken:
            raise OSError(5, "Input/output error")
        return X[indices], Y[indices]


class AtEpoch(keras.callbacks.Callback):
    def __init__(self, epoch, change):
        super().__init__()
        self._epoch, self._change = epoch, change

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            self._change()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A model of several tests with a ledger in a file."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.json"
    model = tf_dpsub.make_private(linear(), ledger_path=path)
    model.compile(dpsgd(), loss())
    return model


def _counts(model):
    """Steps in the ledger, and in its file; those of the optimizer."""
    kept = accounting.PrivacyLedger(model.ledger.path)
    return model.ledger.steps, kept.steps, int(model.optimizer.iterations)


@pytest.mark.parametrize("rows", [19, 21])
def test_a_source_that_shrinks_or_grows_between_epochs(shared, rows):
    before = _counts(shared)
    source = Source()
    batches = PoissonBatches(source, batch_size=4)
    change = AtEpoch(1, lambda: setattr(source, "rows", rows))
    with pytest.raises(ValueError, match=f"source of 20 rows.* got {rows}"):
        shared.fit(batches, epochs=3, callbacks=[change], verbose=0)
    # The first epoch alone.
    assert _counts(shared) == tuple(count + 5 for count in before)
    with pytest.raises(ValueError, match="source of 20 rows"):
        shared.fit(batches, epochs=3, verbose=0)
    assert _counts(shared) == tuple(count + 5 for count in before)
    source.rows = 20
    shared.fit(batches, epochs=3, initial_epoch=1, verbose=0)
    assert _counts(shared) == tuple(count + 15 for count in before)


def test_a_row_that_cannot_be_read(shared):
    before = _counts(shared)
    source = Source()
    batches = PoissonBatches(source, batch_size=4)
    change = AtEpoch(1, lambda: setattr(source, "is_broken", True))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"OSError \(.*\) for row \d"
    ):
        shared.fit(batches, epochs=3, callbacks=[change], verbose=0)
    # Some batches of the second epoch were read ahead.
    ledger, kept, made = (
        after - first for after, first in zip(_counts(shared), before)
    )
    assert 5 <= made <= ledger == kept <= 10
    source.is_broken = False
    shared.fit(batches, epochs=3, initial_epoch=2, verbose=0)
    assert _counts(shared)[0] == before[0] + ledger + 5


def test_fit_on_a_memory_map_that_was_cut(shared, tmp_path):
    before = _counts(shared)
    mapped = np.memmap(tmp_path / "x", "float32", "w+", shape=X.shape)
    mapped[:] = X
    change = AtEpoch(1, lambda: (tmp_path / "x").write_bytes(b""))
    with pytest.raises(ValueError, match="it was cut"):
        shared.fit(mapped, Y, epochs=2, callbacks=[change], verbose=0)
    assert _counts(shared) == tuple(count + 5 for count in before)


class Strategy:
    class cluster_resolver:
        task_id = 1


@pytest.mark.parametrize("total, is_whole", [(47, True), (46, False)])
def test_hosts_hold_all_examples(monkeypatch, total, is_whole):
    """Two replicas of each of three hosts."""

    def gathered(strategy, own):
        assert own.tolist() == [1, len(X)]
        return np.array([[0, 9], [0, 9], own, own, [2, 18], [2, 18]])

    monkeypatch.setattr(workers, "is_one_of_several", lambda strategy: True)
    monkeypatch.setattr(workers, "_gathered", gathered)
    batches = PoissonBatches(X, batch_size=4, total_examples=total)
    if is_whole:
        workers.require_all_examples(Strategy, batches)
    else:
        with pytest.raises(ValueError, match="total_examples=47, the sum"):
            workers.require_all_examples(Strategy, batches)


def test_one_host_alone_holds_all_examples(shared):
    before = _counts(shared)
    batches = PoissonBatches(X, Y, batch_size=4, total_examples=40)
    with pytest.raises(ValueError, match="total_examples=20, the sum"):
        shared.fit(batches, verbose=0)
    assert _counts(shared) == before


def test_persons_need_all_rows():
    batches = PoissonBatches(X, Y, batch_size=4, total_examples=40)
    with pytest.raises(ValueError, match="person_ids or total_examples"):
        private(linear(), dpsgd()).fit(
            batches, person_ids=np.arange(20), verbose=0
        )
