"""What an optimizer claims of a step, for comparison."""

import dataclasses

from tf_dpsub.primitives.release import Release


@dataclasses.dataclass(frozen=True)
class Claims:
    """All that an optimizer claims of a step.

    Where a step is traced, claims become constants: the clip of its sums, and
    then the standard deviation of their noise. No part of a step that was
    traced under other claims may run beside one that was traced under these.

    Attributes:
        mechanism: string, the optimizer's.
        batch_size: int.
        releases: tuple of `Release`, with the clips.
        noise_stddevs: tuple of float, one for each tensor that is released.
        secure_noise: bool.
    """

    mechanism: str
    batch_size: int
    releases: tuple[Release, ...]
    noise_stddevs: tuple[float, ...]
    secure_noise: bool

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
    """
    if not optimizer.is_calibrated:
        return None
    return Claims(
        optimizer.mechanism,
        optimizer.batch_size,
        tuple(optimizer.releases()),
        tuple(optimizer.noise_stddevs()),
        optimizer.secure_noise,
    )
