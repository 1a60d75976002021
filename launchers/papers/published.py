"""Published accuracies, beside which those measured here are shown."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published test accuracy.

    Attributes:
        accuracy: float, in percent.
        epsilon: float.
        what: string, the method.
        source: string, a link.
    """

    accuracy: float
    epsilon: float
    what: str
    source: str


# As their authors' own pages give them, at δ = 1e-5.
_SCATTERNET = "https://github.com/ftramer/Handcrafted-DP"
# By data set.
ACCURACIES = {
    "mnist": (
        Published(
            accuracy=98.7,
            epsilon=3,
            what="ScatterNet, linear",
            source=_SCATTERNET,
        ),
    ),
    "fashion_mnist": (
        Published(
            accuracy=89.7,
            epsilon=3,
            what="ScatterNet, linear",
            source=_SCATTERNET,
        ),
    ),
    "cifar10": (
        Published(
            accuracy=72.3,
            epsilon=1,
            what="DP-RandP",
            source="https://arxiv.org/abs/2306.06076",
        ),
        Published(
            accuracy=69.3, epsilon=3, what="ScatterNet, CNN", source=_SCATTERNET
        ),
        Published(
            accuracy=81.4,
            epsilon=8,
            what="Wide-ResNet-40",
            source="https://arxiv.org/abs/2204.13650",
        ),
    ),
    "sst2": (
        Published(
            accuracy=91.6,
            epsilon=8,
            what="RGP, RoBERTa-base",
            source="https://github.com/dayu11/"
            "Differentially-Private-Deep-Learning/tree/main/language",
        ),
    ),
}
# On MNIST, with public images of the same kind: not in the table above.
PATE = (
    Published(
        accuracy=98.5,
        epsilon=1.97,
        what="Confident-GNMax",
        source="https://arxiv.org/abs/1802.08908",
    ),
)
