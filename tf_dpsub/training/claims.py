"""What an optimizer claims of a step, for comparison."""

import dataclasses

import keras

from tf_dpsub.primitives.release import Release, effective_noise_multiplier


@dataclasses.dataclass(frozen=True)
class Claims:
    """All that an optimizer claims of a step.

    Where a step is traced, claims become constants: the clip of its sums, and
    then the standard deviation of their noise. No part of a step that was
    traced under other claims may run beside one that was traced under these.

    Attributes:
        mechanism: string, the optimizer's.
        batch_size: int.
        l2_norm_clip: float.
        releases: tuple of `Release`, with the clips.
        secure_noise: bool.
        inner_optimizer: `keras.optimizers.Optimizer`, which counts the steps.
    """

    mechanism: str
    batch_size: int
    l2_norm_clip: float
    releases: tuple[Release, ...]
    secure_noise: bool
    inner_optimizer: keras.optimizers.Optimizer

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of the one Gaussian that accounts for a step."""
        return effective_noise_multiplier(list(self.releases))

    def __str__(self):
        releases = " and ".join(
            f"clip {r.clip:g} with noise multiplier {r.noise_multiplier:g}"
            for r in self.releases
        )
        return f"{self.mechanism}, {releases}"


def claims_of(optimizer) -> Claims | None:
    """The claims of an optimizer, None where its noise is to be found yet.

    Args:
        optimizer: `tf_dpsub.optimizers.PrivateOptimizer`.

    Raises:
        ValueError: if its noise is not the one that it claims.
    """
    if not optimizer.is_calibrated:
        return None
    # Numbers of a subclass may be arrays, which change in place.
    claims = Claims(
        optimizer.mechanism,
        int(optimizer.batch_size),
        float(optimizer.l2_norm_clip),
        tuple(
            Release(
                tensors=r.tensors,
                clip=float(r.clip),
                noise_multiplier=float(r.noise_multiplier),
            )
            for r in optimizer.releases()
        ),
        bool(optimizer.secure_noise),
        optimizer.inner_optimizer,
    )
    added = tuple(optimizer.noise_stddevs())
    claimed = tuple(
        r.noise_stddev for r in claims.releases for _ in range(r.tensors)
    )
    if added != claimed:
        raise ValueError(
            f"Expected {type(optimizer).__name__} to add the noise that it "
            "claims in `releases`, of standard deviations "
            f"{sorted(set(claimed))}, got {sorted(set(added))} from "
            "`noise_stddevs`. Override `releases` instead."
        )
    return claims
