"""Full-batch training of a linear head, with settings from public numbers."""

import keras

from tf_dpsub import accounting
from tf_dpsub.checks import check_count, check_positive
from tf_dpsub.optimizers.dpsgd import DPSGD

# In units of the clip, the rate times the standard deviation that the noise of
# one release of the whole budget has in the mean gradient.
_RATE = 1.5e-3
# From a public start, less has to be learnt.
_SHARE_FROM_START = 0.5
# Above this standard deviation fewer steps do.
_MUCH_NOISE = 1e-4
_FEW_STEPS, _MANY_STEPS = 60, 100
# Speed alone: heads are small.
_MICROBATCH = 448


class FullBatch:
    """Settings of full-batch DP-SGD for a head.

    Each step takes all examples, with momentum and a small clip: hardly any
    gradient is below it, so that all count alike. The number of steps and the
    learning rate follow from the number of examples, ε and δ alone, by a rule
    that was fitted to MNIST and Fashion-MNIST. They are for features whose
    median norm is 1, as `tf_dpsub.models.image_features` makes them, and for a
    head that begins at zero, or at a public start.

    Formal guarantees: nothing private is read; the settings are functions of
    the arguments. σ is the smallest with which `steps` Gaussians keep ε by PLD
    accounting.

    Args:
        examples: int, number of private examples `n`.
        epsilon: float, the budget.
        delta: float in (0, 1).
        steps: int, number of steps, each of them an epoch. Defaults to `None`,
            by the rule: 60 or 100.
        learning_rate: float, in units of the clip. Defaults to `None`, by the
            rule.
        l2_norm_clip: float. Defaults to `0.1`.
        momentum: float in [0, 1). Defaults to `0.9`.
        public_start: bool, whether the head begins where public examples led
            it, as `tf_dpsub.heads.fit_public_ridge` does: the rule then halves
            the rate. Defaults to `False`, it begins at zero.

    Attributes: as the arguments, with the values of the rule, and
        noise_multiplier: float, σ of a step.
        noise: float, the standard deviation that one release of the whole
            budget has in the mean gradient, in units of the clip.

    Raises:
        ValueError: if an argument is out of range.

    Example:

    ```python
    head = tf_dpsub.heads.FullBatch(len(x), epsilon=1.0, delta=1e-5)
    model = tf_dpsub.make_private(
        tf_dpsub.models.feature_classifier(features, num_classes=10)
    )
    model.compile(head.optimizer(), loss)
    model.fit(x, y, epochs=head.steps)
    ```
    """

    def __init__(
        self,
        examples: int,
        epsilon: float,
        delta: float,
        *,
        steps: int | None = None,
        learning_rate: float | None = None,
        l2_norm_clip: float = 0.1,
        momentum: float = 0.9,
        public_start: bool = False,
    ):
        check_count("examples", examples)
        check_count("steps", steps, optional=True)
        check_positive("l2_norm_clip", l2_norm_clip)
        if not 0 <= momentum < 1:
            raise ValueError(f"Expected 0 <= momentum < 1, got {momentum}.")
        self.examples, self.epsilon, self.delta = examples, epsilon, delta
        self.l2_norm_clip, self.momentum = l2_norm_clip, momentum
        self.noise = self._sigma(1) / examples
        if steps is None:
            steps = _FEW_STEPS if self.noise > _MUCH_NOISE else _MANY_STEPS
        if learning_rate is None:
            share = _SHARE_FROM_START if public_start else 1.0
            learning_rate = share * _RATE / self.noise
        check_positive("learning_rate", learning_rate)
        self.steps, self.learning_rate = steps, learning_rate
        self.noise_multiplier = self._sigma(steps)

    def optimizer(self, **kwargs) -> DPSGD:
        """Makes the private optimizer.

        Args:
            **kwargs: further arguments of `tf_dpsub.optimizers.DPSGD`.

        Returns:
            A `DPSGD` around `keras.optimizers.SGD`.
        """
        arguments = {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "batch_size": self.examples,
            "microbatch_size": _MICROBATCH,
        }
        return DPSGD(
            keras.optimizers.SGD(
                self.learning_rate / self.l2_norm_clip, momentum=self.momentum
            ),
            **arguments | kwargs,
        )

    def _sigma(self, steps):
        return accounting.noise_multiplier(
            epsilon=self.epsilon,
            delta=self.delta,
            sampling_rate=1.0,
            steps=steps,
            accountant="pld",
        )
