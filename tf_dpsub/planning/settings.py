"""Arguments of `plan`: the planned run, what is compared, how it is tried."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from tf_dpsub import accounting
from tf_dpsub.accounting import banded_factorization
from tf_dpsub.checks import check_choice, check_count, check_fraction
from tf_dpsub.methods import PLANNED

# Batch sizes that are compared where none is given.
_BATCH_SIZES = tuple(2**k for k in range(5, 15))
# The chosen batch is the smallest with at most this multiple of the least
# noise over the run.
_TOLERATED_NOISE = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The private training run that a method is sought for.

    Args:
        examples: int, the number n of private examples.
        epochs: int, how often each private example is expected to be drawn.
        delta: float.
        epsilon: float, the budget. Defaults to `None`: `noise_multiplier` is
            given instead.
        noise_multiplier: float, to use instead of a budget; it needs a
            `batch_size`. Defaults to `None`.
        batch_size: int, the expected one. Defaults to `None`: the smallest
            whose noise over the run is at most a tenth above the least.
        accountant: string, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        sampling: string, `"poisson"` or `"once_per_epoch"`, as for `fit`.
            Defaults to `"poisson"`.

    Raises:
        ValueError: if an argument is out of range, or not exactly one of
            `epsilon` and `noise_multiplier` is given.
    """

    examples: int
    epochs: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    batch_size: int | None = None
    accountant: str = "pld"
    sampling: str = "poisson"

    def __post_init__(self):
        check_count("examples", self.examples)
        check_count("epochs", self.epochs)
        check_choice("sampling", self.sampling, ("poisson", "once_per_epoch"))
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                "Expected epsilon or noise_multiplier, and one of them None, "
                f"got {self.epsilon} and {self.noise_multiplier}."
            )
        if self.noise_multiplier is not None and self.batch_size is None:
            raise ValueError(
                "Expected batch_size with noise_multiplier, got None: which "
                "batch is best is asked for a budget."
            )

    def steps(self, batch_size: int) -> int:
        """Number of steps of the run with batches of this size."""
        return self.epochs * math.ceil(self.examples / batch_size)

    def effective_noise_multiplier(self, batch_size: int) -> float:
        """Noise multiplier that keeps the budget with batches of this size."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        return accounting.noise_multiplier(
            epsilon=self.epsilon,
            delta=self.delta,
            sampling_rate=min(1.0, batch_size / self.examples),
            steps=self.steps(batch_size),
            accountant=self.accountant,
            sampling=self.sampling,
        )

    def batch_noise(self) -> dict[int, float]:
        """Noise in the mean over the run, for each batch size to compare.

        Returns:
            dict from batch sizes to standard deviations of one coordinate,
            relative to the clip.
        """
        if self.batch_size is not None:
            sizes = [self.batch_size]
        else:
            sizes = [b for b in _BATCH_SIZES if 4 * b <= self.examples]
        return {
            size: self.effective_noise_multiplier(size)
            / (size * math.sqrt(self.steps(size)))
            for size in sizes or [self.examples]
        }

    def band_noise(self, batch_size: int) -> dict[int, float]:
        """Noise in the weights over the run, for numbers of bands of `DPSGD`.

        Returns:
            dict, as of `banded_factorization.noise_of_bands`; empty where the
            noise multiplier is given.
        """
        if self.epsilon is None:
            return {}
        return banded_factorization.noise_of_bands(
            self.examples,
            min(batch_size, self.examples),
            self.steps(batch_size),
            self.epsilon,
            self.delta,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The methods that are compared, and their settings.

    Args:
        methods: collection of string, some of `"DP-SGD"`, `"PDP-SGD"`,
            `"B-GEP"`, `"GEP"` and `"RGP"`. Defaults to all.
        clips: collection of float. Defaults to `None`: 0.1, 0.3 and 1 times
            the median norm of public gradients.
        ranks: collection of int, of subspaces; those above what the public
            examples span are left out. Defaults to `(10, 50, 200)`.
        carrier_ranks: collection of int, of RGP. Defaults to `(2, 8, 16)`.
        carriers: dict, further arguments of `tf_dpsub.layers.reparametrize`,
            such as `exclude`. Defaults to `None`.
        groups: as for `tf_dpsub.subspaces.PublicSubspace`. Defaults to `1`.
        basis: tuple of inputs and targets (None for random labels) of public
            examples that make the subspaces. Defaults to `None`: those of
            `x_public` that are not held out.

    Raises:
        ValueError: if `methods` is empty or has an unknown one.
    """

    methods: Collection[str] = PLANNED
    clips: Collection[float] | None = None
    ranks: Collection[int] = (10, 50, 200)
    carrier_ranks: Collection[int] = (2, 8, 16)
    carriers: dict | None = None
    groups: Any = 1
    basis: tuple | None = None

    def __post_init__(self):
        unknown = [m for m in self.methods if m not in PLANNED]
        if unknown or not self.methods:
            raise ValueError(
                f"Expected methods among {', '.join(PLANNED)}, got "
                f"{', '.join(map(str, unknown)) or 'none'}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """The training on public examples that stands for the run.

    Args:
        optimizer: inner Keras optimizer, or its name. Defaults to `"sgd"`.
        l2_norm_clip: float, the clip of the simulated training, which goes
            with the learning rate. Defaults to `None`: the smallest of the
            clips that are compared.
        held_out: float, the share of the public examples on which the methods
            are measured. The others are trained on. Defaults to `0.5`.
        splits: int, number of random splits of the public examples, each with
            a simulated training, over which all is averaged: more than one is
            for few examples. Defaults to `1`.
        simulated_steps: int, the most steps of a training. Defaults to `1000`.
        points: int, number of weights along a training at which gradients are
            measured. Defaults to `5`.

    Raises:
        ValueError: if an argument is out of range.
    """

    optimizer: Any = "sgd"
    l2_norm_clip: float | None = None
    held_out: float = 0.5
    splits: int = 1
    simulated_steps: int = 1000
    points: int = 5

    def __post_init__(self):
        for name in ("simulated_steps", "points", "splits"):
            check_count(name, getattr(self, name))
        check_fraction("held_out", self.held_out)


def smallest_quiet_batch(batch_noise: dict[int, float]) -> int:
    """The smallest batch size whose noise is about the least.

    Args:
        batch_noise: dict, as `PlannedRun.batch_noise` returns it.

    Returns:
        int.
    """
    least = min(batch_noise.values())
    return min(
        size
        for size, noise in batch_noise.items()
        if noise <= _TOLERATED_NOISE * least
    )
