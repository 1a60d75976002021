"""Ways to a private classifier, in the order of rules from experiments."""

import dataclasses

from tf_dpsub.planning import rules
from tf_dpsub.planning.rules import rule_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Approach:
    """A way to a private classifier.

    Attributes:
        representation: string, such as `"scattering"`; `"own model"` where
            all layers are trained.
        rank: int, number of public directions that are kept; None for all.
        whiten: float, exponent by which public variances are divided out.
        start: string, `"zero"`; `"ridge"`, by `heads.fit_public_ridge`; or
            `"fit_public"`.
        trained: string, `"head"` or `"all layers"`.
        mechanism: string, `"FullBatch"`, `"PrivateRidge"` or `"DP-SGD"`.
        accuracy: float, simulated on public examples that were held out; of
            all layers, after public training alone. None if not simulated.
        standard_error: float, of the accuracy.
    """

    representation: str
    rank: int | None
    whiten: float
    start: str
    trained: str
    mechanism: str
    accuracy: float | None = None
    standard_error: float | None = None

    @property
    def name(self) -> str:
        """The approach in words."""
        if self.trained == "all layers":
            return "all layers by DP-SGD, trained on public examples before"
        scales = "z-scores"
        if self.rank is not None:
            scales = f"{self.rank} directions, whiten = {self.whiten:g}"
        start = ", started by ridge on public labels" * (self.start == "ridge")
        return (
            f"{self.mechanism} head on {self.representation} ({scales}){start}"
        )


def candidates(situation, starts, sizes):
    """All approaches, in the order of the rules.

    Args:
        situation: `Situation`.
        starts: list of string.
        sizes: dict from representations to numbers of features or None.
    """
    exponents, of_starts = (
        rule_of(table, situation).choices
        for table in (rules.WHITENING, rules.STARTS)
    )
    # Of a few examples that stand for many, a start says nothing new: rules
    # alone choose it.
    start = next((c for c in of_starts if c in starts), None)
    mechanisms = []
    if start is not None:
        mechanisms = [("FullBatch", start), ("PrivateRidge", "zero")]
    of_heads = []
    for name, size in sizes.items():
        of_ranks = rules.ranks(situation, size)
        fewest = min(rank for rank in of_ranks if rank is not None)
        for rank in dict.fromkeys([*of_ranks, None]):
            of_heads += [
                Approach(
                    representation=name,
                    rank=rank,
                    whiten=whiten,
                    start=start,
                    trained="head",
                    mechanism=mechanism,
                )
                # All features have z-scores alone.
                for whiten in ([0.0] if rank is None else exponents)
                for mechanism, start in mechanisms
                # Its release is of the square of the rank: few suit it.
                if mechanism != "PrivateRidge"
                or (rank, whiten) == (fewest, exponents[0])
            ]
    of_layers = [
        Approach(
            representation="own model",
            rank=None,
            whiten=0.0,
            start="fit_public",
            trained="all layers",
            mechanism="DP-SGD",
        )
    ] * ("fit_public" in starts)
    order = rule_of(rules.TRAINED, situation).choices
    parts = {"head": of_heads, "all layers": of_layers}
    return [approach for part in order for approach in parts[part]]
