"""What experiments tell about representations, starts and heads, as data.

Rules order what `recommend` compares. Public labels may overturn the order,
where a simulation on them is decided. Figures are test accuracies, of one to
four seeds, of prototypes in NumPy of what the package has, unless they name a
page of the documentation.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

# Below this epsilon, noise hides the features that a model would have to learn.
LEAST_EPSILON_FROM_SCRATCH = 1.0
# With so many labelled public examples, all layers are trained on them first.
_MANY_LABELS = 1000
# Fewer public examples know fewer directions.
FEW_PUBLIC = 1000
_MOST_DIRECTIONS = 1000
# Below this noise in the mean gradient, few directions cost more than noise.
_LITTLE_NOISE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """The public numbers that rules look at.

    Args:
        kind: string, `"grey images"`, `"coloured images"`, `"texts"` or
            `"vectors"`.
        noise: float, the standard deviation that one release of the whole
            budget has in the mean gradient, relative to the clip.
        public: int, number of public examples that scale features.
        labelled: int, number of labelled public examples.
        has_features: bool, whether pretrained features are given.
        has_model: bool, whether a model is given whose layers can be trained.
    """

    kind: str
    noise: float
    public: int
    labelled: int = 0
    has_features: bool = False
    has_model: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A preference, with its reason.

    Attributes:
        holds: function of a `Situation` that returns a bool.
        choices: tuple, the best first.
        reason: string, in plain words.
        evidence: string, the measurements it rests on, or `"judgement"`.
    """

    holds: Callable[[Situation], bool]
    choices: tuple[Any, ...]
    reason: str
    evidence: str


REPRESENTATIONS = (
    Rule(
        holds=lambda s: s.has_features,
        choices=("given features",),
        reason="Features that were pretrained on other data cost no privacy.",
        evidence="published: Tramèr and Boneh, 2021, section 4",
    ),
    Rule(
        holds=lambda s: s.kind == "texts",
        choices=("sentence embeddings",),
        reason="A small private set teaches no language: a pretrained encoder "
        "of sentences knows it.",
        evidence="SST-2, ε = 1: 82.6 %; docs/results.md",
    ),
    Rule(
        holds=lambda s: s.kind == "grey images",
        choices=("scattering", "scattering and patches", "patches"),
        reason="On grey images, fixed wavelets are ahead of patches of public "
        "images, and far ahead of layers that are trained from scratch.",
        evidence="MNIST, n = 10,000, ε = 0.2: scattering 94.7 %, patches "
        "92.8 %, a convolutional network from scratch 82.3 %",
    ),
    Rule(
        holds=lambda s: s.kind == "coloured images",
        choices=("scattering and patches", "patches", "scattering"),
        reason="Patches of public images know colours; wavelets add edges.",
        evidence="CIFAR-10, n = 10,000, ε = 1: patches 59.7 %; a ResNet-20 "
        "from scratch has 29 % at ε = 8",
    ),
    Rule(
        holds=lambda s: s.kind == "vectors",
        choices=("inputs",),
        reason="Numbers that are features already need scaling alone.",
        evidence="judgement",
    ),
)

WHITENING = (
    Rule(
        holds=lambda s: s.kind == "grey images" and s.public >= FEW_PUBLIC,
        choices=(1.0, 0.5, 0.0),
        reason="Whitened, loud directions such as the contrast no longer use "
        "up the clip.",
        evidence="scattering, n = 10,000, ε = 0.2, above z-scores: MNIST "
        "+1.7, Fashion-MNIST +1.3 points; of patches on MNIST it loses 0.9",
    ),
    Rule(
        holds=lambda s: True,
        choices=(0.5, 1.0, 0.0),
        reason="Half of the whitening is safe where directions are known "
        "less well.",
        evidence="CIFAR-10, n = 10,000, ε = 1: exponent ½ 59.7 %, 1 59.5 %, "
        "z-scores 58.7 %",
    ),
)

DIRECTIONS = (
    Rule(
        holds=lambda s: s.public >= FEW_PUBLIC,
        choices=(1 / 2,),
        reason="Half as many directions as public examples, 1,000 at most, "
        "keep nearly all of a private example.",
        evidence="MNIST, scattering: 200, 500 directions keep 91, 95 % of the "
        "energy; ridge on them has 97.7, 98.3 %",
    ),
    Rule(
        holds=lambda s: s.noise < _LITTLE_NOISE,
        choices=(None, 1 / 2),
        reason="At this noise, what few public directions lose is more than "
        "what they save.",
        evidence="MNIST, n = 10,000, 100 public examples, ε = 8: 98.4 % with "
        "z-scores, 97.7 % with 50 directions",
    ),
    Rule(
        holds=lambda s: s.labelled > 0,
        choices=(1 / 2, 1 / 5),
        reason="A start on labelled examples makes use of many directions.",
        evidence="digits, 200 public examples, ε = 2: 98.1 % with 100, 96.7 % "
        "with 40",
    ),
    Rule(
        holds=lambda s: True,
        choices=(1 / 5, 1 / 2),
        reason="Few public examples know few directions well.",
        evidence="digits, 200 public examples without labels, ε = 0.5: 87.7 % "
        "with 40, 82.5 % with 100",
    ),
)

TRAINED = (
    Rule(
        holds=lambda s: s.has_model and s.labelled >= _MANY_LABELS,
        choices=("all layers", "head"),
        reason="So many labelled public examples teach all layers, which "
        "private training then starts from.",
        evidence="judgement",
    ),
    Rule(
        holds=lambda s: True,
        choices=("head", "all layers"),
        reason="Noise falls on few weights if only a head is trained.",
        evidence="MNIST, n = 10,000, ε = 0.2: head 94.8 %, all layers of a "
        "network that was trained on 100 public examples before 93.8 %",
    ),
)

STARTS = (
    Rule(
        holds=lambda s: s.labelled > 0,
        choices=("ridge", "zero"),
        reason="A start that knows the public labels leaves less to learn "
        "through noise.",
        evidence="MNIST, n = 10,000, 100 labels, three seeds: 94.1 to 94.8 % "
        "at ε = 0.2, 97.0 to 97.3 % at 1; docs/results.md",
    ),
    Rule(
        holds=lambda s: True,
        choices=("zero",),
        reason="Without labels a head starts at zero.",
        evidence="there is no other start",
    ),
)

MECHANISMS = (
    Rule(
        holds=lambda s: True,
        choices=("FullBatch", "PrivateRidge"),
        reason="Full batches with a small clip have the least noise; their "
        "settings follow from n, ε and δ.",
        evidence="MNIST, n = 10,000: one release of ridge regression is 1.3 "
        "to 1.6 points below, at ε of 0.2 and 1",
    ),
)


def rule_of(table: tuple[Rule, ...], situation: Situation) -> Rule:
    """The first rule of a table that holds.

    Args:
        table: tuple of `Rule`, of which one holds.
        situation: `Situation`.
    """
    return next(rule for rule in table if rule.holds(situation))


def ranks(situation: Situation, size: int | None) -> tuple[int | None, ...]:
    """Numbers of public directions to compare, the best first; None for all.

    Args:
        situation: `Situation`.
        size: int, number of features; None if it is not known.
    """
    most = min(_MOST_DIRECTIONS, size or _MOST_DIRECTIONS)
    shares = rule_of(DIRECTIONS, situation).choices
    compared = [
        None
        if share is None
        else min(most, max(1, int(share * situation.public)))
        for share in shares
    ]
    return tuple(dict.fromkeys(compared))
