"""Callback that shows the moving average of the weights to what reads them."""

import keras


class SwapEMAWeights(keras.callbacks.Callback):
    """Evaluates, and saves, the moving average of the weights.

    The average is that of the inner optimizer, `use_ema=True`, which `fit`
    writes into the model when it ends. Until then, the model has the weights
    that are trained. This callback puts the average in their place while the
    model is validated; with `swap_on_epoch=True` also between the end of an
    epoch and the beginning of the next: callbacks that come after it, as
    `ModelCheckpoint`, then save the average. `BackupAndRestore` comes before
    it, as it has to keep the weights that are trained.

    The callback of Keras of that name swaps by adding and subtracting. This
    rounds the weights, which are then no longer those that private steps have
    made; and where training stops early, it loses the average.

    Formal guarantees: an average of released weights is post-processing, and
    costs no privacy.

    Args:
        swap_on_epoch: bool, whether the model has the average between epochs.
            Defaults to `False`.

    Raises:
        ValueError: in `fit`, if the inner optimizer makes no average.

    Example:

    ```python
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(2.0, use_ema=True, ema_momentum=0.999),
            ema_warmup=True,
            l2_norm_clip=1.0, noise_multiplier=1.1, batch_size=256,
        ),
        loss="sparse_categorical_crossentropy",
    )
    model.fit(
        x, y, epochs=15,
        validation_data=validation_data,
        callbacks=[
            tf_dpsub.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint("{epoch}.keras"),
        ],
    )
    ```
    """

    def __init__(self, swap_on_epoch: bool = False):
        super().__init__()
        self.swap_on_epoch = swap_on_epoch
        # Of the model, while it has the average.
        self._trained: list | None = None

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if not optimizer.use_ema:
            raise ValueError(
                "Expected an inner optimizer with a moving average for "
                "SwapEMAWeights, got use_ema=False. Pass "
                f"`{type(optimizer).__name__}(..., use_ema=True, "
                "ema_momentum=0.99)`."
            )
        self._optimizer = optimizer
        self._trained = None

    def on_epoch_begin(self, epoch, logs=None):
        self._show_trained()

    def on_epoch_end(self, epoch, logs=None):
        if self.swap_on_epoch:
            self._show_average()

    def on_test_begin(self, logs=None):
        self._show_average()

    def on_test_end(self, logs=None):
        self._show_trained()

    def _show_average(self):
        if self._trained is None:
            variables = self._optimizer._trainable_variables
            averages = self._optimizer._model_variables_moving_average
            self._trained = _assigned(variables, map(_value, averages))

    def _show_trained(self):
        if self._trained is not None:
            _assigned(self._optimizer._trainable_variables, self._trained)
            self._trained = None


def _assigned(variables, values) -> list:
    """Sets variables, and returns their values of before."""
    before = []
    for variable, value in zip(variables, values, strict=True):
        before.append(_value(variable))
        variable.assign(value)
    return before


def _value(variable):
    return keras.ops.convert_to_numpy(variable)
