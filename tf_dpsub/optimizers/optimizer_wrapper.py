"""An optimizer around another one, as Keras expects it."""

import keras
import tensorflow as tf


class OptimizerWrapper(keras.optimizers.Optimizer):
    """An optimizer whose inner one applies the gradients.

    State of the inner optimizer is saved with it, learning rates and steps are
    its own. Gradients reach it through this optimizer's step alone.

    Args:
        optimizer: Keras optimizer, or its name.
        ema_warmup: bool, whether the momentum of the inner optimizer's moving
            average of the weights grows to its value. Defaults to `False`.
        name: string. Defaults to `None`.

    Raises:
        ValueError: if `optimizer` is a wrapper itself, scales the loss, or has
            no moving average to warm up.
    """

    def __init__(
        self, optimizer, *, ema_warmup: bool = False, name: str | None = None
    ):
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner = _checked_inner(optimizer)
        if ema_warmup and not inner.use_ema:
            raise ValueError(
                "Expected an inner optimizer with a moving average for "
                "ema_warmup=True, got use_ema=False. Pass "
                f"`{type(inner).__name__}(..., use_ema=True, "
                "ema_momentum=0.99)`."
            )
        self.ema_warmup = bool(ema_warmup)

    def build(self, variables):
        self.inner_optimizer.build(variables)
        super().build(variables)

    @property
    def variables(self):
        return self._variables + self.inner_optimizer.variables

    def save_own_variables(self, store):
        # The inner optimizer's are saved with it.
        for i, variable in enumerate(self._variables):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store):
        # In files of earlier versions the inner optimizer's follow.
        if len(store.keys()) not in (len(self._variables), len(self.variables)):
            super().load_own_variables(store)
            return
        for i, variable in enumerate(self._variables):
            variable.assign(store[str(i)])

    @property
    def learning_rate(self):
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self):
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list):
        self.inner_optimizer.finalize_variable_values(var_list)

    def apply_inner(self, gradients: list):
        """Lets the inner optimizer take a step.

        Args:
            gradients: list of tensors, one for each trainable variable.
        """
        inner = self.inner_optimizer
        momentum = inner.ema_momentum
        if self.ema_warmup:
            steps = tf.cast(tf.convert_to_tensor(self.iterations), tf.float32)
            inner.ema_momentum = tf.minimum(
                momentum, (1 + steps) / (10 + steps)
            )
        try:
            inner.apply(gradients, self._trainable_variables)
        finally:
            inner.ema_momentum = momentum

    def apply(self, grads, trainable_variables=None):
        self._refuse()

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        self._refuse()

    def scale_loss(self, loss):
        self._refuse()

    def _refuse(self):
        raise RuntimeError(
            f"{type(self).__name__} was used outside of a private model: a "
            "plain model hands it gradients that are neither clipped nor "
            "noisy. Nothing was trained. Wrap the model first, "
            "`model = tf_dpsub.make_private(model)`, and train by `model.fit`; "
            "a loop of your own around gradients cannot be private."
        )

    def get_config(self):
        return {
            "optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "ema_warmup": self.ema_warmup,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)


def _checked_inner(optimizer):
    if isinstance(optimizer, type):
        raise ValueError(
            f"Expected an optimizer, got the class {optimizer.__name__}. Call "
            f"it: {optimizer.__name__}()."
        )
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, OptimizerWrapper):
        raise ValueError(
            f"Expected a plain inner optimizer, got {type(optimizer).__name__},"
            " which is private itself. Wrap its `inner_optimizer` instead."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or (
        optimizer.loss_scale_factor is not None
    ):
        raise ValueError(
            "Expected an inner optimizer without loss scaling, got "
            f"{type(optimizer).__name__} with it: scaling would move the "
            "gradients against the clip. A private model scales float16 losses "
            "itself, by a constant. Pass the plain optimizer."
        )
    return optimizer
