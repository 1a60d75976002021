"""Releases of a step, as data from which its privacy follows."""

import dataclasses
import math
import numbers

# Squares of smaller norms may be flushed to zero.
SMALLEST_NORM = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """Tensors that a step releases together, with Gaussian noise.

    Attributes:
        tensors: int, how many there are.
        clip: float, the norm by which one example moves all of them together.
        noise_multiplier: float, standard deviation of the noise in each number
            relative to `clip`.
    """

    tensors: int
    clip: float
    noise_multiplier: float

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise in each number."""
        # Zero times an infinite clip would be NaN.
        if self.noise_multiplier == 0:
            return 0.0
        return self.noise_multiplier * self.clip


def effective_noise_multiplier(releases: list[Release]) -> float:
    """Noise multiplier of the one Gaussian that accounts for all releases.

    Divided by their standard deviations, releases have unit noise, and move
    together by at most the root of the sum of `noise_multiplier ** -2`.

    Args:
        releases: list of `Release`, of the same examples.

    Returns:
        float; 0 if one of the releases has no noise.
    """
    multipliers = [release.noise_multiplier for release in releases]
    if len(multipliers) == 1:
        return multipliers[0]
    if 0 in multipliers:
        return 0.0
    return 1 / math.hypot(*(1 / m for m in multipliers))


def check_privacy(
    noise_multiplier: float, l2_norm_clip: float, prefix: str = ""
):
    """Checks a noise multiplier and the clip that it belongs to.

    Args:
        noise_multiplier: float.
        l2_norm_clip: float.
        prefix: string, of the names in messages. Defaults to `""`.

    Raises:
        ValueError: if one is out of range.
    """
    multiplier = f"{prefix}noise_multiplier"
    clip = f"{prefix}norm_clip" if prefix else "l2_norm_clip"
    for name, value in ((multiplier, noise_multiplier), (clip, l2_norm_clip)):
        if not isinstance(value, numbers.Real):
            raise ValueError(f"Expected {name} to be a number, got {value!r}.")
    if not noise_multiplier >= 0 or math.isinf(noise_multiplier):
        raise ValueError(
            f"Expected finite {multiplier} >= 0, got {noise_multiplier}."
        )
    if not l2_norm_clip > 0:
        raise ValueError(f"Expected {clip} > 0, got {l2_norm_clip}.")
    if l2_norm_clip < SMALLEST_NORM:
        raise ValueError(
            f"Expected {clip} >= {SMALLEST_NORM}, got {l2_norm_clip}: "
            "squares of smaller norms may be flushed to zero. Scale the loss "
            "and the clip up."
        )
    if math.isinf(l2_norm_clip) and noise_multiplier > 0:
        raise ValueError(
            f"Expected a finite {clip} with {multiplier} > 0, got "
            "inf: without a clip no amount of noise makes a sum private."
        )
