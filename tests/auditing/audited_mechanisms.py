"""Mechanisms that an audit is given in tests, and one that it refuses."""

import numpy as np

from tf_dpsub import optimizers
from tf_dpsub.auditing import MechanismAudit
from tf_dpsub.auditing.step_audit import INPUTS, OUTPUTS
from tf_dpsub.subspaces import (
    FixedSubspace,
    KroneckerSubspace,
    PublicSubspace,
    RandomSubspace,
)

# At q = 1 and delta = 1e-5 a step has epsilon 1.
SETTINGS = {"noise_multiplier": 3.73, "l2_norm_clip": 0.7, "batch_size": 16}
CHECKS = [
    "variance",
    "distribution",
    "independence",
    "divisor",
    "sensitivity",
    "epsilon",
    "low bits",
]


def subspace(weights):
    directions = np.random.default_rng(0).normal(size=(weights, 5))
    return FixedSubspace(np.linalg.qr(directions)[0], public=True)


def dpsgd(inner, weights, make=optimizers.DPSGD, **changes):
    return make(inner, **SETTINGS | changes)


def in_subspace(make, **changes):
    return lambda inner, weights: make(
        inner, subspace=subspace(weights), **SETTINGS | changes
    )


def in_random_subspace(make, **changes):
    return lambda inner, weights: make(
        inner, subspace=RandomSubspace(rank=5, seed=0), **SETTINGS | changes
    )


def public_examples():
    """Inputs and targets whose gradients have a spectrum that falls steeply."""
    random = np.random.default_rng(0)
    x = random.normal(size=(30, sum(INPUTS)))
    y = random.normal(size=(30, sum(OUTPUTS)))
    return tuple(a * np.logspace(0, -3, a.shape[1]) for a in (x, y))


def in_pairs(make, subspace=KroneckerSubspace, **changes):
    """A mechanism in pairs of directions of each kernel."""
    return lambda inner, weights: make(
        inner,
        subspace=subspace(
            *public_examples(), rank=12, side_rank=3, update_every=10**9
        ),
        **SETTINGS | changes,
    )


def whitened(make, **changes):
    """A mechanism in the coordinates of a spectrum that falls steeply."""
    x, y = public_examples()
    return lambda inner, weights: make(
        inner,
        subspace=PublicSubspace(
            x, y, rank=5, method="gram", whiten=1.0, update_every=10**9
        ),
        **SETTINGS | changes,
    )


MECHANISMS = {
    "DPSGD": dpsgd,
    "DPSGD, one at a time": lambda inner, weights: dpsgd(
        inner, weights, per_example="vectorized_map"
    ),
    "DPSGD, secure noise": lambda inner, weights: dpsgd(
        inner, weights, secure_noise=True
    ),
    "DPSGD, automatic": lambda inner, weights: dpsgd(
        inner, weights, clipping="automatic"
    ),
    "DPSGD, unit norm": lambda inner, weights: dpsgd(
        inner, weights, clipping="unit_norm"
    ),
    "DPSGD, clips of layers": lambda inner, weights: dpsgd(
        inner, weights, l2_norm_clip={"kernel0": 0.3, "kernel1": 0.6}
    ),
    "AdaptiveDPSGD": lambda inner, weights: dpsgd(
        inner, weights, optimizers.AdaptiveDPSGD, clipped_count_stddev=3.0
    ),
    "ProjectedDPSGD": in_subspace(optimizers.ProjectedDPSGD),
    "ProjectedDPSGD, ambient": in_random_subspace(
        optimizers.ProjectedDPSGD, noise="ambient"
    ),
    "GEP": in_subspace(optimizers.GEP, residual_norm_clip=0.2),
    "GEP, unequal": in_subspace(
        optimizers.GEP, residual_norm_clip=0.2, residual_noise_multiplier=2.0
    ),
    "GEP, unit norm": in_subspace(
        optimizers.GEP, residual_norm_clip=0.2, clipping="unit_norm"
    ),
    "B-GEP": in_random_subspace(optimizers.GEP, residual=False),
    "GEP, pairs": in_pairs(optimizers.GEP, residual_norm_clip=0.2),
    "ProjectedDPSGD, whitened": whitened(optimizers.ProjectedDPSGD),
    "ProjectedDPSGD, whitened, all directions": whitened(
        optimizers.ProjectedDPSGD, truncate=False
    ),
    "GEP, whitened": whitened(optimizers.GEP, residual_norm_clip=0.2),
    "B-GEP, whitened": whitened(optimizers.GEP, residual=False),
    "RGP": lambda inner, weights: dpsgd(
        inner, weights, optimizers.RGP, carriers="random"
    ),
    "RGP, public": lambda inner, weights: dpsgd(
        inner,
        weights,
        optimizers.RGP,
        carriers="public",
        **dict(zip(("x_public", "y_public"), public_examples())),
    ),
    "DPPowerSGD": lambda inner, weights: dpsgd(
        inner, weights, optimizers.DPPowerSGD, rank=2
    ),
}
# Of each kind of sum one. Rows are made, in half precision or of several views,
# before they are clipped, by whatever rule.
KINDS_OF_SUMS = (
    "DPSGD",
    "DPSGD, one at a time",
    "AdaptiveDPSGD",
    "ProjectedDPSGD",
    "GEP",
    "ProjectedDPSGD, whitened",
    "GEP, whitened",
    "RGP",
    "RGP, public",
    "DPPowerSGD",
)


def audit_of(make, name="", **settings):
    carrier_rank = 2 if name.startswith("RGP") else None
    return MechanismAudit(make, carrier_rank=carrier_rank, **settings)


class Underhand:
    """Draws other noise than it claims: one sees it by drawing alone."""

    _is_drawing = False

    def drawn(self, claimed):
        """Standard deviations that are drawn: a twin says which."""
        raise NotImplementedError

    def add_noise(self, key, sums, dtype):
        self._is_drawing = True
        try:
            return super().add_noise(key, sums, dtype)
        finally:
            self._is_drawing = False

    def noise_stddevs(self):
        claimed = super().noise_stddevs()
        return self.drawn(claimed) if self._is_drawing else claimed


class WithHalfTheNoise(Underhand, optimizers.DPSGD):
    def drawn(self, claimed):
        return [s / 2 for s in claimed]
