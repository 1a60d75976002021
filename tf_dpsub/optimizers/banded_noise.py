"""The noise of `DPSGD` where steps share it."""

import math

import keras
import tensorflow as tf

from tf_dpsub.accounting import banded_factorization
from tf_dpsub.checks import check_count
from tf_dpsub.primitives import grid
from tf_dpsub.primitives.carried_noise import CarriedNoise, grid_noise

# For steps whose number is not known, as where one is only measured.
_STEPS = 1000


class BandedNoise:
    """The number of bands of an optimizer, their ratios, and their noise.

    Args:
        optimizer: `DPSGD`.
        bands: int, or `"auto"`.

    Attributes:
        given: `bands`, as given.

    Raises:
        ValueError: if `bands` is neither, is to be found without a target, or
            if the coordinates of noise move.
    """

    def __init__(self, optimizer, bands: int | str):
        if bands != 1 and not optimizer.has_fixed_coordinates:
            raise ValueError(
                f"Expected bands=1 with {type(optimizer).__name__}, got "
                f"{bands!r}: later steps can take back only what is left as it "
                "was, and here the coordinates of noise, or of what is kept of "
                "it, change. Take DPSGD."
            )
        if bands == "auto":
            if optimizer.target is None:
                raise ValueError(
                    'Expected epsilon and delta with bands="auto", got '
                    f"noise_multiplier={optimizer.noise_multiplier}: which "
                    "number of bands is best depends on them. Give them, or a "
                    "number of bands."
                )
        elif isinstance(bands, str):
            raise ValueError(
                f'Expected bands to be an int or "auto", got {bands!r}.'
            )
        else:
            check_count("bands", bands)
            bands = int(bands)
        self.given = bands
        self._optimizer = optimizer
        self._bands = None if bands == "auto" else int(bands)
        self._steps = _STEPS
        self._carried: CarriedNoise | None = None
        self._built_ratios: tuple = ()

    @property
    def bands(self) -> int:
        """The number of bands.

        Raises:
            RuntimeError: if it is to be found yet.
        """
        if self._bands is None:
            raise RuntimeError(
                'Expected a number of bands, got bands="auto", which `fit` '
                "finds once it knows how many examples and steps there are. "
                "Call it first, or give a number."
            )
        return self._bands

    def plan(self, examples: int, steps: int):
        """Chooses bands and ratios for a run, without any data.

        Args:
            examples: int, number of private examples.
            steps: int, number of steps of the whole run.
        """
        if self.given == "auto":
            target = self._optimizer.target
            self._bands = banded_factorization.best_bands(
                examples,
                self._optimizer.batch_size,
                max(1, steps),
                target.epsilon,
                target.delta,
            )
        self._steps = max(1, steps)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Coefficients of the matrix C over the first of them, `[bands]`."""
        inner, momentum = self._optimizer.inner_optimizer, 0.0
        if isinstance(inner, keras.optimizers.SGD):
            momentum = inner.momentum
        first, *others = banded_factorization.coefficients(
            self.bands, self._steps, momentum
        )
        return (1.0, *(c / first for c in others))

    def build_for(self, model):
        """Creates what the noise of steps is kept in, if anything is.

        A step that was traced with others is forgotten.

        Args:
            model: compiled `PrivateModel`, whose optimizer is built.
        """
        if self._bands is None:
            return
        ratios = self.ratios
        if ratios == self._built_ratios:
            return
        if self._built_ratios:
            model.train_function = None
        self._built_ratios, self._carried = ratios, None
        if self.bands > 1:
            shapes = self._optimizer.sum_shapes()
            count = sum(math.prod(shape) for shape in shapes)
            self._carried = CarriedNoise(self.bands, count)

    def forget(self):
        """Begins with the noise of no step; a run does before its first."""
        if self._carried is not None:
            self._carried.forget()

    def grid_noises(self, sums: list) -> list:
        """The fresh noise of a step, for each sum; None without noise."""
        optimizer = self._optimizer
        count = sum(s.shape.num_elements() for s in sums)
        return [
            grid_noise(
                stddev, optimizer.l2_norm_clip, count, self._built_ratios
            )
            if stddev
            else None
            for stddev in optimizer.noise_stddevs()
        ]

    def noisy(self, key, sums: list, noises: list, dtype: str) -> list:
        """Adds the noise of a step to its sums, as `CarriedNoise` says.

        Args:
            key: int64 tensor of shape `[2]`, for this call alone.
            sums: list of tensors, what is released.
            noises: list, as of `grid_noises`.
            dtype: string, of the results.

        Returns:
            List of tensors.
        """
        assert self._carried is not None
        (fresh,) = set(noises)
        drawn = self._carried.advance(
            key, self._built_ratios, fresh, self._optimizer.secure_noise
        )
        pieces = tf.split(drawn, [s.shape.num_elements() for s in sums])
        return [
            tf.cast(
                grid.rounded(s, fresh.spacing) + tf.reshape(piece, s.shape),
                dtype,
            )
            for s, piece in zip(sums, pieces, strict=True)
        ]
