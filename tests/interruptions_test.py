"""A signal ends training, even if its exception is dropped."""

import signal
import threading

import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import interruptions


@pytest.fixture(autouse=True)
def ctrl_c_raises():
    """Sets Python's own handler, which background processes begin without."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


class _Finalized:
    """Sends a signal from a finalizer, in which Python drops exceptions."""

    def __init__(self, number):
        self._number = number

    def __del__(self):
        signal.raise_signal(self._number)


def _private_model():
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    )
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            "sgd", l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=2
        ),
        loss="mse",
    )
    return model


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("moment", ["on_epoch_begin", "on_train_end"])
def test_ctrl_c_that_is_dropped_ends_training(moment):
    class Dropping(keras.callbacks.Callback):
        pass

    setattr(Dropping, moment, lambda *_: _Finalized(signal.SIGINT) and None)
    model = _private_model()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            np.ones([4, 2]), np.ones(4), verbose=0, callbacks=[Dropping()]
        )
    # Nothing is charged for after it.
    assert model.ledger.steps == (0 if moment == "on_epoch_begin" else 2)
    assert signal.getsignal(signal.SIGINT) is handler
    # The next call of `fit` is not affected.
    model.fit(np.ones([4, 2]), np.ones(4), verbose=0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_exceptions_of_a_users_handler_are_kept():
    def handler(number, frame):
        raise SystemExit(number)

    earlier = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit), interruptions.kept():
            _Finalized(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_an_exception_that_gets_through_is_raised_once():
    with interruptions.kept():
        with pytest.raises(KeyboardInterrupt), interruptions.kept():
            signal.raise_signal(signal.SIGINT)
        interruptions.check()


def test_in_a_thread_handlers_stay_as_they_are():
    handlers = []

    def enter():
        with interruptions.kept():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
