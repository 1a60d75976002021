"""Workers compare what they are going to do, before they do it."""

import numpy as np
import pytest
import tensorflow as tf

from tests.training.plain_models import X, Y, dpsgd, linear, private
from tf_dpsub.training import workers

SETTINGS = {"l2_norm_clip": 1.0, "examples": 600, "seed": None}


@pytest.fixture(name="others")
def _others(monkeypatch):
    """What each of three workers would send, this one in the middle."""
    sent = []

    def gathered(strategy, own):
        return np.stack([sent[0](own), own, sent[1](own)])

    monkeypatch.setattr(workers, "is_one_of_several", lambda strategy: True)
    monkeypatch.setattr(workers, "_gathered", gathered)

    def send(first, last):
        sent[:] = first, last

    return send


def same(own):
    return own


def shifted(place, by):
    def send(own):
        return own + by * (np.arange(len(own)) == place)

    return send


def test_those_who_agree_train(others):
    others(same, same)
    workers.require_agreement(None, SETTINGS, X)


@pytest.mark.parametrize("first, last", [(0, 1), (1, 0), (1, 1), (1, -1)])
def test_others_are_refused_by_name(others, first, last):
    """Also where the three cancel in a sum."""
    others(shifted(0, first), shifted(0, last))
    with pytest.raises(
        ValueError, match=r"another l2_norm_clip on .* \(l2_nor"
    ):
        workers.require_agreement(None, SETTINGS, X)


def test_the_data_are_compared_and_not_shown(others):
    sent = []

    def keep(own):
        sent.append(own)
        return own

    others(keep, keep)
    for x in (X, X + 1, X[:10]):
        workers.require_agreement(None, SETTINGS, {"a": x, "b": [Y, Y]})
    assert len({tuple(own) for own in sent}) == 3
    others(shifted(3, 1), same)
    with pytest.raises(ValueError, match=r"another data on .* \(own data\)"):
        workers.require_agreement(None, SETTINGS, X)


def test_one_that_is_lost_is_told(others):
    def gone(own):
        raise tf.errors.UnavailableError(None, None, "Socket closed\nmore")

    others(gone, same)
    with pytest.raises(ConnectionError, match="lost: Socket closed Start all"):
        workers.require_agreement(None, SETTINGS)


def test_fit_asks_before_it_trains(others):
    model = private(linear(), dpsgd())
    others(same, same)
    model.fit(X, Y, verbose=0)
    spent = model.ledger.steps
    for place in range(30):
        others(shifted(place, 1), same)
        try:
            model.fit(X, Y, verbose=0)
        except ValueError as error:
            assert "Nothing was trained" in str(error)
        else:
            break
        assert model.ledger.steps == spent
    # Each of them, and there is no further one.
    assert 15 <= place < 30


@pytest.mark.parametrize(
    "changes",
    [
        {"l2_norm_clip": 2.0},
        {"noise_multiplier": 2.0},
        {"batch_size": 5},
        {"seed": 1},
    ],
)
def test_fit_compares_what_the_account_is_made_of(others, changes):
    sent = []

    def keep(own):
        sent.append(own)
        raise tf.errors.AbortedError(None, None, "enough")

    others(keep, same)
    for changed in ({}, {}, changes):
        model = private(linear(), dpsgd(**changed))
        with pytest.raises(ConnectionError):
            model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(sent[0], sent[1])
    assert (sent[1] != sent[2]).any()


def test_single_steps_need_a_single_replica(monkeypatch):
    model = private(linear(), dpsgd())

    class Two:
        num_replicas_in_sync = 2

    monkeypatch.setattr(type(model), "distribute_strategy", Two())
    with pytest.raises(ValueError, match="one replica for train_on_batch"):
        model.train_on_batch(X[:4], Y[:4])
    assert model.ledger.steps == 0
