"""The noise of an optimizer: given, or found for an ε that is given."""

import dataclasses

from tf_dpsub.checks import check_delta, check_epsilon
from tf_dpsub.primitives.release import check_privacy


@dataclasses.dataclass(frozen=True)
class Target:
    """Up to where `fit` may spend, earlier steps in the ledger included.

    Attributes:
        epsilon: float, > 0.
        delta: float in (0, 1).
    """

    epsilon: float
    delta: float

    def __str__(self):
        return f"(ε = {self.epsilon:.12g}, δ = {self.delta:.12g})"


class NoiseSetting:
    """A noise multiplier, or the target from which `fit` will find it.

    Args:
        multiplier: float, or None with a target.
        epsilon: float, > 0, of the target; or None.
        delta: float in (0, 1), of the target; or None.
        calibrated: float, what `fit` found for the target before; or None.
        l2_norm_clip: float, the clip that the noise is relative to.

    Attributes:
        target: `Target`, or None.

    Raises:
        ValueError: if not exactly one of both is given, or out of range.
    """

    def __init__(
        self,
        multiplier: float | None,
        epsilon: float | None,
        delta: float | None,
        calibrated: float | None,
        l2_norm_clip: float,
    ):
        if (multiplier is None) == (epsilon is None):
            got = "neither" if epsilon is None else f"{multiplier}, {epsilon}"
            raise ValueError(
                "Expected either noise_multiplier, or epsilon and delta, for "
                f"which `fit` finds it, got {got}. Give one of them."
            )
        if (epsilon is None) != (delta is None):
            raise ValueError(
                f"Expected epsilon and delta together, got {epsilon} and "
                f"{delta}. delta is to be well below 1 / (number of examples)."
            )
        self.target = None
        if epsilon is not None and delta is not None:
            check_epsilon(epsilon)
            check_delta(delta)
            self.target = Target(float(epsilon), float(delta))
            multiplier = calibrated
        # With a target there will be noise, which needs a clip.
        check_privacy(1.0 if multiplier is None else multiplier, l2_norm_clip)
        self._multiplier = None if multiplier is None else float(multiplier)

    @property
    def is_known(self) -> bool:
        """Whether there is a noise multiplier already."""
        return self._multiplier is not None

    @property
    def multiplier(self) -> float:
        """The noise multiplier.

        Raises:
            RuntimeError: if it is to be found yet.
        """
        if self._multiplier is None:
            raise RuntimeError(
                "Expected a noise multiplier, got none yet: `fit` finds it for "
                f"{self.target}, once it knows how many examples and steps "
                "there are. Call it first, or give noise_multiplier."
            )
        return self._multiplier

    @multiplier.setter
    def multiplier(self, value: float | None):
        if self.target is None:
            raise ValueError(
                "Expected epsilon and delta, for which noise is found, got a "
                f"noise multiplier, {self._multiplier}, which is frozen. "
                "Compile with another optimizer."
            )
        self._multiplier = None if value is None else float(value)

    def get_config(self) -> dict:
        """The arguments of an optimizer, and what was found for them."""
        if self.target is None:
            return {"noise_multiplier": self._multiplier}
        return {
            "noise_multiplier": None,
            **dataclasses.asdict(self.target),
            "found_noise_multiplier": self._multiplier,
        }
