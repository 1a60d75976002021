"""Private methods by the names that papers give them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Method:
    """A private optimizer, with the arguments that make it this method.

    Attributes:
        name: string.
        optimizer: string, the name of a class in `tf_dpsub.optimizers`.
        kwargs: dict, arguments of this class. Defaults to none.
        has_pairs: bool, whether its subspace is a `KroneckerSubspace`, of pairs
            of directions of each kernel. Defaults to `False`.
    """

    name: str
    optimizer: str
    kwargs: dict = dataclasses.field(default_factory=dict)
    has_pairs: bool = False

    @property
    def bands(self) -> int:
        """Number of steps that share their noise."""
        return self.kwargs.get("bands", 1)

    @property
    def needs_subspace(self) -> bool:
        return self.optimizer in ("ProjectedDPSGD", "GEP")

    @property
    def needs_carriers(self) -> bool:
        return self.optimizer == "RGP"

    @property
    def follows_public_examples(self) -> bool:
        """Whether its carriers follow gradients of public examples."""
        return self.kwargs.get("carriers") == "public"

    @property
    def has_residual(self) -> bool:
        """Whether residuals are released, which have a clip of their own."""
        return self.optimizer == "GEP" and self.kwargs.get("residual", True)


METHODS = {
    method.name: method
    for method in (
        Method("DP-SGD", "DPSGD"),
        Method("DP-SGD (4 bands)", "DPSGD", {"bands": 4}),
        Method("PDP-SGD", "ProjectedDPSGD"),
        Method("PDP-SGD (ambient)", "ProjectedDPSGD", {"noise": "ambient"}),
        Method("PDP-SGD (pairs)", "ProjectedDPSGD", has_pairs=True),
        Method("GEP", "GEP"),
        Method("GEP (pairs)", "GEP", has_pairs=True),
        Method("B-GEP", "GEP", {"residual": False}),
        Method("RGP", "RGP"),
        Method("RGP-random", "RGP", {"carriers": "random"}),
        Method("RGP-public", "RGP", {"carriers": "public"}),
        Method("DP-PowerSGD", "DPPowerSGD"),
    )
}
# Those that the planner compares, the cheapest first.
PLANNED = ("DP-SGD", "PDP-SGD", "B-GEP", "GEP", "RGP")


def method_of(optimizer: str, kwargs) -> Method | None:
    """The method that an optimizer with some arguments is.

    Args:
        optimizer: string, the name of a class in `tf_dpsub.optimizers`.
        kwargs: mapping, its arguments.

    Returns:
        A `Method`: of several that fit, the one with the most arguments. None
        if there is none.
    """
    return max(
        (
            method
            for method in METHODS.values()
            if method.optimizer == optimizer
            and all(kwargs.get(k) == v for k, v in method.kwargs.items())
        ),
        key=lambda method: len(method.kwargs),
        default=None,
    )
