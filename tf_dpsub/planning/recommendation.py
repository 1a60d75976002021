"""Recommendation of representation, start and head, from public examples."""

import dataclasses
import itertools
import math
from collections.abc import Collection

import keras
import numpy as np

from tf_dpsub import accounting, heads
from tf_dpsub.checks import check_choice, check_seed
from tf_dpsub.heads import public_ridge
from tf_dpsub.planning import representations, rules, simulated_heads
from tf_dpsub.planning.rules import Situation, rule_of
from tf_dpsub.training.public_training import fit_public

STARTS = ("zero", "ridge", "fit_public")
# The fewest labelled public examples, in all and of a class on average, that
# are simulated on.
_LEAST_LABELLED = 40
_LEAST_OF_A_CLASS = 4
# Labelled public examples in parts, each of which is held out once; of more
# than so many, one part is enough.
_PARTS = 5
_MANY_LABELLED = 600
# The parts on which all layers are trained, which takes longer.
_PARTS_OF_LAYERS = 1
# The order of rules stands unless a difference is so many standard errors: it
# is the largest of about twenty.
_DECIDED = 3.0
# Of DP-SGD on all layers, after public training.
_EPOCHS, _STEPS_OF_AN_EPOCH, _CLIP, _RATE = 15, 10, 1.0, 0.2


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The result of `recommend`.

    Attributes:
        examples: int, number n of private examples.
        epsilon: float, the budget.
        delta: float.
        kind: string, of inputs: `"grey images"`, `"coloured images"`,
            `"texts"` or `"vectors"`.
        approaches: list of `Approach`, in the order of the rules.
        recommended: `Approach`.
        settings: dict, of its mechanism.
        noise: float, the standard deviation that one release of the whole
            budget has in the mean gradient of the private examples, relative
            to the clip.
        public_accuracy: float, simulated, of the start of the recommended
            approach without any private example; None if not simulated.
        reasons: list of string.
        code: string, Python that trains so.
    """

    examples: int
    epsilon: float
    delta: float
    kind: str
    approaches: list
    recommended: Approach
    settings: dict
    noise: float
    public_accuracy: float | None
    reasons: list
    code: str


def recommend(
    x_public,
    y_public=None,
    *,
    examples: int,
    epsilon: float,
    delta: float,
    other_public=None,
    features=None,
    text_encoder: dict | None = None,
    model=None,
    starts: Collection[str] | None = None,
    num_classes: int | None = None,
    seed: int = 0,
) -> Recommendation:
    """Decides how to come to a private classifier, from public examples.

    It chooses a representation that costs no privacy, how public examples scale
    it, a start, what is trained and by which mechanism. Rules from experiments
    (`tf_dpsub.planning.rules`) put the candidates in order. With labels, heads
    are simulated: a part of the public examples stands for the private ones,
    with the noise in the mean gradient that those have, and accuracy is
    measured on the others. The first candidate in the order that is not behind
    the best by more than three standard errors is recommended. Few examples
    stand for many, so that simulated accuracies are below those of the run.

    Formal guarantees: no private example is read, and nothing is released. What
    enters beside public examples are n, ε and δ, which have to be public, as
    for accounting. Public examples must not be private ones.

    Args:
        x_public: array of public inputs of the kind of the private ones: images
            `[m, height, width, 1 or 3]` in [0, 1], vectors `[m, numbers]`,
            texts, or pairs of texts. None if there are `other_public` alone.
        y_public: int array `[m]`, their labels. Defaults to `None`.
        examples: int, number n of private examples.
        epsilon: float, the budget.
        delta: float in (0, 1).
        other_public: array, public inputs of another kind, of the same shape,
            without labels. They scale features where there are fewer than
            1,000 `x_public`. Defaults to `None`.
        features: built Keras model of pretrained features, for instance a
            `keras.applications` network without its top. Defaults to `None`.
        text_encoder: dict, arguments of `tf_dpsub.models.sentence_classifier`
            that name an encoder of texts: `folder` or `preset`, and
            `sequence_length`. Defaults to `None`: texts are not simulated.
        model: built plain `keras.Model`, of which all layers would be trained,
            on labelled public examples first. It is copied. Defaults to `None`.
        starts: collection of string, some of `"zero"`, `"ridge"` and
            `"fit_public"`. Defaults to `None`: all for which there are labels.
        num_classes: int. Defaults to `None`, one above the largest label.
        seed: int, of parts and noise. Defaults to `0`.

    Returns:
        A `Recommendation`.

    Raises:
        ValueError: if an argument is out of range, if there are no public
            examples, if they are of another kind, shape or range, if labels do
            not fit, or if a start needs labels or a model that are missing.

    Example:

    ```python
    advice = tf_dpsub.planning.recommend(
        x_public, y_public, examples=60_000, epsilon=0.5, delta=1e-5
    )
    print(advice.recommended.name, *advice.reasons, advice.code, sep="\\n")
    ```
    """
    check_seed(seed)
    x, others = _checked_inputs(x_public, other_public)
    labels, classes = _checked_labels(x, y_public, num_classes)
    starts = _checked_starts(starts, labels, model)
    few = x is None or len(x) < rules.FEW_PUBLIC
    is_scaled_by_others = others is not None and few
    scaling = others if is_scaled_by_others else x
    head, head_from_ridge = (
        heads.FullBatch(examples, epsilon, delta, public_start=is_started)
        for is_started in (False, True)
    )
    situation = Situation(
        kind=representations.kind_of(scaling),
        noise=head.noise,
        public=len(scaling),
        labelled=0 if labels is None else len(labels),
        has_features=features is not None,
        has_model="fit_public" in starts,
    )
    sizes = {
        name: representations.size(name, scaling.shape[1:], features)
        for name in rule_of(rules.REPRESENTATIONS, situation).choices
    }
    approaches = _candidates(situation, starts, sizes)
    reasons = [
        f"The budget leaves noise of {head.noise:.2g} of the clip in the mean "
        f"gradient of {examples:,} examples."
    ]
    simulation = None
    obstacle = _obstacle(situation, classes, text_encoder)
    if obstacle is None:
        simulation = _Simulation(
            representations.Representations(
                scaling,
                x if is_scaled_by_others else scaling,
                features,
                text_encoder,
                seed,
            ),
            x,
            labels,
            classes,
            {"zero": head, "ridge": head_from_ridge},
            model,
            seed,
        )
        approaches = simulation.run(approaches)
    else:
        reasons.append(f"The order of the rules decides: {obstacle}.")
    chosen, verdict = _chosen(approaches, simulation)
    reasons += [*_rules_for(chosen, situation), *verdict]
    public_accuracy = None
    if simulation is not None:
        public_accuracy = simulation.public_accuracy(chosen)
    if public_accuracy is not None:
        reasons.append(
            f"Public examples alone have {100 * public_accuracy:.1f} % in the "
            "simulation: compare the private model with that."
        )
    return Recommendation(
        examples=examples,
        epsilon=epsilon,
        delta=delta,
        kind=situation.kind,
        approaches=approaches,
        recommended=chosen,
        settings=_settings(
            chosen, head_from_ridge if chosen.start == "ridge" else head
        ),
        noise=head.noise,
        public_accuracy=public_accuracy,
        reasons=reasons,
        code=_code(
            chosen,
            head,
            "other_public" if is_scaled_by_others else "x_public",
            scaling.shape[1:],
            text_encoder,
        ),
    )


def _checked_inputs(x_public, other_public):
    """Inputs of the private ones' kind, and others, as arrays or None."""
    arrays = [
        None if inputs is None else representations.checked(inputs)
        for inputs in (x_public, other_public)
    ]
    given = [array for array in arrays if array is not None and len(array)]
    if not given:
        raise ValueError(
            "Expected public examples, got none. Some 2,000 images or texts of "
            "any kind, without labels, are enough to scale features: pass them "
            "as other_public."
        )
    if len({array.shape[1:] for array in given}) > 1 or (
        len({array.dtype for array in given}) > 1
    ):
        x, others = given
        raise ValueError(
            "Expected other_public of the shape of x_public, "
            f"{x.dtype} {x.shape[1:]}, got {others.dtype} {others.shape[1:]}. "
            "`tf_dpsub.data.load_images` fits images to a shape."
        )
    return [a if a is not None and len(a) else None for a in arrays]


def _checked_labels(x, y_public, num_classes):
    """Labels as ints, or None, and the number of classes."""
    if y_public is None or not len(y_public):
        return None, num_classes
    labels = np.asarray(y_public).reshape(-1)
    examples = 0 if x is None else len(x)
    if len(labels) != examples:
        raise ValueError(
            f"Expected a label for each of {examples} x_public, got "
            f"{len(labels)} labels."
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise ValueError(
            "Expected labels that are integers from 0 on, got "
            f"{labels.dtype} from {labels.min()}. Pass the numbers of the "
            "classes, not one-hot vectors."
        )
    least = int(labels.max()) + 1
    if num_classes is not None and num_classes < least:
        raise ValueError(
            f"Expected labels below num_classes = {num_classes}, got "
            f"{least - 1}."
        )
    return labels.astype(int), num_classes or max(2, least)


def _checked_starts(starts, labels, model):
    """Starts to compare: those for which there is what they need."""
    possible = ["zero"]
    if labels is not None:
        possible += ["ridge"] + ["fit_public"] * (model is not None)
    if starts is None:
        return possible
    for start in starts:
        check_choice("a start", start, STARTS)
        if start not in possible:
            missing = "labels of public examples"
            if labels is not None:
                missing = "a model whose layers are trained"
            raise ValueError(
                f"Expected {missing} for the start {start!r}, got none. Pass "
                f"{'y_public' if labels is None else 'model'}, or leave the "
                "start out."
            )
    if not starts:
        raise ValueError(f"Expected some of {STARTS} as starts, got none.")
    return list(starts)


def _candidates(situation, starts, sizes):
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


def _obstacle(situation, classes, text_encoder):
    """Why nothing can be simulated, or None."""
    if not situation.labelled:
        return "public examples have no labels to simulate with"
    least = max(_LEAST_LABELLED, _LEAST_OF_A_CLASS * classes)
    if situation.labelled < least:
        return (
            f"{situation.labelled} labelled public examples are too few to "
            f"simulate with, {least} would do"
        )
    is_text = situation.kind == "texts" and not situation.has_features
    if is_text and text_encoder is None:
        return "no text_encoder was given to simulate with"
    return None


class _Simulation:
    """Accuracies on labelled public examples that are held out.

    Args:
        features: `representations.Representations`.
        x: array, labelled public inputs.
        labels: int array.
        classes: int.
        by_start: dict from starts to the `heads.FullBatch` of the run.
        model: as for `recommend`.
        seed: int.
    """

    def __init__(self, features, x, labels, classes, by_start, model, seed):
        self._features, self._x, self._labels = features, x, labels
        self._classes, self._by_start, self._model = classes, by_start, model
        self._seed = seed
        order = np.random.default_rng(seed).permutation(len(labels))
        parts = np.array_split(order, _PARTS)
        self._held_out = parts[:1] if len(order) > _MANY_LABELLED else parts
        # Whether each example that was held out was classified rightly; NaN
        # for those that were not held out. [examples]
        self._right: dict = {}

    def run(self, approaches):
        """The approaches with their accuracies; those that fit.

        Args:
            approaches: list of `Approach`.
        """
        right = {}
        for name in dict.fromkeys(a.representation for a in approaches):
            members = [a for a in approaches if a.representation == name]
            if name == "own model":
                right |= dict.fromkeys(members, self._of_layers())
            else:
                right |= self._of_heads(name, members)
        simulated = []
        for approach in approaches:
            if approach not in right:
                continue
            counted = right[approach][~np.isnan(right[approach])]
            simulated.append(
                dataclasses.replace(
                    approach,
                    accuracy=float(counted.mean()),
                    standard_error=float(counted.std() / len(counted) ** 0.5),
                )
            )
            self._right[simulated[-1]] = right[approach]
        return simulated

    def _of_heads(self, representation, approaches):
        """Dict from approaches to whether examples were classified rightly.

        Those with more directions than features span are left out.
        """
        scaling, labelled = self._features.of(representation)
        is_common = scaling is labelled
        held_out = len(self._held_out[0]) if is_common else 0
        most = min(scaling.shape[1], len(scaling) - held_out - 1)
        approaches = [a for a in approaches if (a.rank or 0) <= most]
        right = {approach: self._none_held_out() for approach in approaches}
        widest = max((a.rank or 0 for a in approaches), default=0)
        scales = None
        for part, rows in enumerate(self._held_out):
            rest = np.setdiff1d(np.arange(len(labelled)), rows)
            if widest and (is_common or scales is None):
                # What is held out scales nothing, as private examples do not.
                public = labelled[rest] if is_common else scaling
                scales = representations.Scales(public, widest)
            for (rank, whiten), members in itertools.groupby(
                approaches, lambda a: (a.rank, a.whiten)
            ):
                inputs = labelled
                if rank is not None:
                    inputs = scales.function(rank, whiten)(labelled)
                ridge = public_ridge.Ridge(
                    inputs[rest].astype(np.float64),
                    self._labels[rest],
                    self._classes,
                )
                start = public_ridge.SCALE * ridge.solution(
                    ridge.best_regularization()
                )
                kernels = {(representation, rank, whiten): start}
                for approach in members:
                    kernels[approach] = self._kernel(
                        approach, inputs[rest], self._labels[rest], start, part
                    )
                for key, kernel in kernels.items():
                    right.setdefault(key, self._none_held_out())[rows] = (
                        simulated_heads.is_right(
                            kernel, inputs[rows], self._labels[rows]
                        )
                    )
        # Of starts without private examples.
        for key in [k for k in right if isinstance(k, tuple)]:
            self._right[key] = right.pop(key)
        return right

    def _none_held_out(self):
        return np.full(len(self._labels), np.nan)

    def _kernel(self, approach, features, labels, ridge, part):
        """The head of an approach, trained on a part of public examples."""
        # The same noise for all that have the same shape.
        seed = [self._seed, part]
        if approach.mechanism == "PrivateRidge":
            return simulated_heads.private_ridge(
                features,
                labels,
                self._classes,
                len(labels) * self._by_start["zero"].noise,
                self._seed + part,
            )
        start = ridge if approach.start == "ridge" else np.zeros_like(ridge)
        return simulated_heads.full_batch(
            features,
            labels,
            start,
            self._by_start[approach.start],
            np.random.default_rng(seed),
        )

    def _of_layers(self):
        """All layers after public training, which private training follows."""
        right = self._none_held_out()
        is_image = self._x.ndim == 4
        for part, held_out in enumerate(self._held_out[:_PARTS_OF_LAYERS]):
            rest = np.setdiff1d(np.arange(len(self._labels)), held_out)
            copy = keras.models.clone_model(self._model)
            copy.set_weights(self._model.get_weights())
            fit_public(
                copy,
                self._x[rest],
                self._labels[rest],
                augmentation="affine" if is_image else None,
                seed=self._seed + part,
            )
            logits = public_ridge.outputs(copy, self._x[held_out])
            right[held_out] = logits.argmax(1) == self._labels[held_out]
        return right

    def public_accuracy(self, approach):
        """The accuracy of the start of an approach, or of ridge, alone."""
        if approach.trained == "all layers":
            return approach.accuracy
        key = approach.representation, approach.rank, approach.whiten
        return float(np.nanmean(self._right[key]))

    def rival(self, approach, others):
        """The approach with the most decided lead over one, or None."""
        ahead = []
        for other in others:
            lead, error = self.lead(other, approach)
            if lead > _DECIDED * error:
                ahead.append((lead / error, other))
        return max(ahead, key=lambda pair: pair[0])[1] if ahead else None

    def lead(self, first, second):
        """The lead of one approach over another, and its standard error.

        Both are of the examples on which both were measured.
        """
        differences = self._right[first] - self._right[second]
        differences = differences[~np.isnan(differences)]
        count = len(differences)
        # As if they differed on one example more: of a few that all agree the
        # error is not 0.
        variance = differences.var() + 1 / count
        return float(differences.mean()), float((variance / count) ** 0.5)


def _chosen(approaches, simulation):
    """The recommended approach, and sentences on why it is that one."""
    if not approaches:
        raise ValueError(
            "Expected more public examples: they span fewer directions than "
            "any approach keeps."
        )
    first = approaches[0]
    if simulation is None:
        return first, []
    # Compared one by one: not all were measured on the same examples.
    chosen = next(
        (a for a in approaches if simulation.rival(a, approaches) is None),
        max(approaches, key=lambda a: a.accuracy),
    )
    verdict = [
        f"Simulated: {chosen.name} has {100 * chosen.accuracy:.1f} ± "
        f"{100 * chosen.standard_error:.1f} % (few examples stand for many: "
        "the run should have more)."
    ]
    best = max(approaches, key=lambda a: a.accuracy)
    lead, error = simulation.lead(best, chosen)
    if lead > 0:
        verdict.append(
            f"The best in the simulation, {best.name}, leads by "
            f"{100 * lead:.1f} ± {100 * error:.1f} points, which decides "
            "nothing: the order of the rules stands."
        )
    if chosen is not first:
        rival = simulation.rival(first, approaches)
        lead, error = simulation.lead(rival, first)
        verdict.append(
            f"What the rules have first, {first.name}, is behind {rival.name} "
            f"by {100 * lead:.1f} ± {100 * error:.1f} points: the simulation "
            "overrules them."
        )
    return chosen, verdict


def _rules_for(chosen, situation):
    """Reasons of the rules that the recommended approach follows."""
    values = {"TRAINED": chosen.trained}
    if chosen.trained == "head":
        values |= {
            "REPRESENTATIONS": chosen.representation,
            "WHITENING": None if chosen.rank is None else chosen.whiten,
            "STARTS": chosen.start,
            "MECHANISMS": chosen.mechanism,
        }
    followed = []
    for table, value in values.items():
        rule = rule_of(getattr(rules, table), situation)
        if rule.choices[0] == value:
            followed.append(f"{rule.reason} ({rule.evidence})")
    return followed


def _settings(chosen, head):
    """Settings of the mechanism of an approach."""
    if chosen.mechanism == "FullBatch":
        return {
            "steps": head.steps,
            "learning_rate": head.learning_rate,
            "l2_norm_clip": head.l2_norm_clip,
            "momentum": head.momentum,
            "noise_multiplier": head.noise_multiplier,
            "batch_size": head.examples,
        }
    if chosen.mechanism == "PrivateRidge":
        return {"noise_multiplier": head.noise * head.examples}
    batch_size = max(1, head.examples // _STEPS_OF_AN_EPOCH)
    return {
        "epochs": _EPOCHS,
        "learning_rate": _RATE,
        "l2_norm_clip": _CLIP,
        "noise_multiplier": accounting.noise_multiplier(
            epsilon=head.epsilon,
            delta=head.delta,
            sampling_rate=batch_size / head.examples,
            steps=_EPOCHS * math.ceil(head.examples / batch_size),
            accountant="pld",
        ),
        "batch_size": batch_size,
    }


_LOSS = "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"


def _code(chosen, head, public, shape, text_encoder):
    """Python that trains an approach, on `x` and `y`."""
    budget = f"epsilon={head.epsilon}, delta={head.delta}"
    if chosen.trained == "all layers":
        own = _settings(chosen, head)
        augmentation = '"affine"' if len(shape) == 3 else None
        lines = [
            "tf_dpsub.fit_public(",
            f"    plain, x_public, y_public, augmentation={augmentation}",
            ")",
            "model = tf_dpsub.make_private(plain)",
            "optimizer = tf_dpsub.optimizers.DPSGD(",
            f"    keras.optimizers.SGD({own['learning_rate']}),",
            f"    l2_norm_clip={own['l2_norm_clip']},",
            f"    noise_multiplier={own['noise_multiplier']:.6g},",
            f"    batch_size={own['batch_size']},",
            ")",
            f"model.compile(optimizer, {_LOSS})",
            "batches = tf_dpsub.data.PoissonBatches(",
            f"    x, y, batch_size={own['batch_size']}",
            ")",
            f"model.fit(batches, epochs={own['epochs']})",
        ]
    else:
        lines = representations.code(chosen, public, shape, text_encoder)
        if chosen.start == "ridge":
            lines.append(
                "tf_dpsub.heads.fit_public_ridge(plain, x_public, y_public)"
            )
        lines.append("model = tf_dpsub.make_private(plain)")
        if chosen.mechanism == "PrivateRidge":
            lines.append(
                f"tf_dpsub.heads.PrivateRidge({budget}).fit(model, x, y)"
            )
        else:
            start = ", public_start=True" * (chosen.start == "ridge")
            lines += [
                f"head = tf_dpsub.heads.FullBatch(len(x), {budget}{start})",
                "model.compile(",
                f"    head.optimizer(), {_LOSS}",
                ")",
                "model.fit(x, y, epochs=head.steps)",
            ]
    return "\n".join(["import keras", "import tf_dpsub", "", *lines]) + "\n"
