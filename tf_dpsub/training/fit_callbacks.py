"""Callbacks that every call of `fit` of a private model has."""

import keras
from keras import tree


class EpochCounter(keras.callbacks.Callback):
    """Tells the run where an epoch begins and ends, before all others."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.current_run.begin_epoch(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.model.current_run.end_epoch(epoch)


class StepCounter(keras.callbacks.Callback):
    """Tells the run when a step begins, after all others."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.current_run.expect_step(batch)


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's bar, which shows how many examples were dropped if any were."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, _worth_showing(logs))

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, _worth_showing(logs))


def _worth_showing(logs):
    return {k: v for k, v in (logs or {}).items() if k != "dropped" or v > 0}


def completed(callbacks, verbose):
    """Adds these callbacks to those of the user.

    Args:
        callbacks: as `keras.Model.fit` takes them.
        verbose: as `keras.Model.fit` takes it.

    Returns:
        List of callbacks, or the `CallbackList` that was given.
    """
    epochs, steps = EpochCounter(), StepCounter()
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        flat = tree.flatten(getattr(callbacks, "callbacks", callbacks) or [])
        if verbose and not any(
            isinstance(c, keras.callbacks.ProgbarLogger) for c in flat
        ):
            flat = [*flat, ProgressBar()]
        return [epochs, *flat, steps]
    # A list of the caller's, who may use it for several runs, and may have put
    # others before and behind the counters.
    for counter in (epochs, steps):
        counter.set_model(callbacks.model)
    own = (EpochCounter, StepCounter)
    others = [c for c in callbacks.callbacks if not isinstance(c, own)]
    callbacks.callbacks[:] = [epochs, *others, steps]
    return callbacks
