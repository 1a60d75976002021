"""Recommendation of representation, start and head, from public examples."""

import dataclasses
import math
from collections.abc import Collection

import numpy as np

from tf_dpsub import accounting, heads
from tf_dpsub.checks import check_choice, check_seed
from tf_dpsub.planning import representations, rules
from tf_dpsub.planning.approaches import Approach, candidates
from tf_dpsub.planning.held_out_accuracies import HeldOutAccuracies
from tf_dpsub.planning.rules import Situation, rule_of

STARTS = ("zero", "ridge", "fit_public")
# The fewest labelled public examples, in all and of a class on average, that
# are simulated on.
_LEAST_LABELLED = 40
_LEAST_OF_A_CLASS = 4
# Of DP-SGD on all layers, after public training.
_EPOCHS, _STEPS_OF_AN_EPOCH, _CLIP, _RATE = 15, 10, 1.0, 0.2


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
    approaches = candidates(situation, starts, sizes)
    reasons = [
        f"The budget leaves noise of {head.noise:.2g} of the clip in the mean "
        f"gradient of {examples:,} examples."
    ]
    simulation = None
    obstacle = _obstacle(situation, classes, text_encoder)
    if obstacle is None:
        simulation = HeldOutAccuracies(
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
        settings = _settings(chosen, head)
        augmentation = '"affine"' if len(shape) == 3 else None
        lines = [
            "tf_dpsub.fit_public(",
            f"    plain, x_public, y_public, augmentation={augmentation}",
            ")",
            "model = tf_dpsub.make_private(plain)",
            "optimizer = tf_dpsub.optimizers.DPSGD(",
            f"    keras.optimizers.SGD({settings['learning_rate']}),",
            f"    l2_norm_clip={settings['l2_norm_clip']},",
            f"    {budget},",
            f"    batch_size={settings['batch_size']},",
            ")",
            f"model.compile(optimizer, {_LOSS})",
            "batches = tf_dpsub.data.PoissonBatches(",
            f"    x, y, batch_size={settings['batch_size']}",
            ")",
            f"model.fit(batches, epochs={settings['epochs']})",
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
