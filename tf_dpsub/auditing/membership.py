"""Membership inference: can it be told who was trained on?"""

import dataclasses

import numpy as np
from sklearn import (
    ensemble,
    linear_model,
    metrics,
    model_selection,
    pipeline,
    preprocessing,
)

from tf_dpsub.auditing.lower_bounds import clopper_pearson

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
# Standard deviations that shadow models do not show, of scores.
_LEAST_DEVIATION = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """How well an attack tells members from others.

    Attributes:
        success: float, the share of right answers on equally many members and
            others that were not used to make the attack. Guessing has 0.5.
        interval: tuple of two floats, its exact interval.
        confidence: float, of the interval.
        auc: float, area under the ROC curve.
        true_positive_rates: dict from false positive rates to the highest true
            positive rate at no more than these.
        examples: int, members and others that were attacked.
    """

    success: float
    interval: tuple
    confidence: float
    auc: float
    true_positive_rates: dict
    examples: int


def loss_threshold_attack(
    member_losses, other_losses, *, confidence: float = 0.95, seed: int = 0
):
    """Says that an example was trained on if its loss is below a threshold.

    One half of both finds the threshold that is right most often, the other
    half is attacked, as in the RGP paper.

    Args:
        member_losses: array `[n]`, of examples that were trained on.
        other_losses: array `[m]`, of examples of the same kind that were not.
            Of the larger side, as many as there are of the smaller one are
            drawn.
        confidence: float, of the interval. Defaults to `0.95`.
        seed: int, of what is drawn. Defaults to `0`.

    Returns:
        A `Membership`.

    Raises:
        ValueError: if there are too few examples, or a loss is not a number.

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352), section 5.3
        - [Yeom et al., 2018](https://arxiv.org/abs/1709.01604)
    """
    scores, labels = _balanced(member_losses, other_losses, seed)
    scores = -scores[:, 0]
    fitted, attacked = _halves(labels, seed)
    threshold = _best_threshold(scores[fitted], labels[fitted])
    return _membership(
        scores[attacked],
        labels[attacked],
        scores[attacked] >= threshold,
        confidence,
    )


def classifier_attack(
    member_features,
    other_features,
    *,
    classifier="logistic",
    confidence: float = 0.95,
    seed: int = 0,
):
    """Lets a classifier learn who was trained on, from what a model answers.

    Args:
        member_features: array `[n, features]`, as `attack_features` makes
            them, of examples that were trained on.
        other_features: array `[m, features]`, of others.
        classifier: string, `"logistic"` or `"forest"`, or a scikit-learn
            classifier with `predict_proba`. Defaults to `"logistic"`.
        confidence: float, of the interval. Defaults to `0.95`.
        seed: int. Defaults to `0`.

    Returns:
        A `Membership`, of the half that the classifier did not learn from.

    Raises:
        ValueError: as `loss_threshold_attack`.
    """
    makers = {
        "logistic": lambda: pipeline.make_pipeline(
            preprocessing.StandardScaler(),
            linear_model.LogisticRegression(max_iter=1000),
        ),
        "forest": lambda: ensemble.RandomForestClassifier(
            n_estimators=200, min_samples_leaf=5, random_state=seed
        ),
    }
    if isinstance(classifier, str):
        if classifier not in makers:
            raise ValueError(
                f"Expected classifier in {tuple(makers)}, or a scikit-learn "
                f"classifier, got {classifier!r}."
            )
        classifier = makers[classifier]()
    features, labels = _balanced(member_features, other_features, seed)
    fitted, attacked = _halves(labels, seed)
    classifier.fit(features[fitted], labels[fitted])
    scores = classifier.predict_proba(features[attacked])[:, 1]
    return _membership(scores, labels[attacked], scores >= 0.5, confidence)


def likelihood_ratio_attack(
    scores,
    is_member,
    shadow_scores,
    shadow_is_member,
    *,
    confidence: float = 0.95,
):
    """Compares a model with shadow models that saw an example or did not.

    For each example, the scores of shadow models that were trained on it, and
    of those that were not, are taken as normal. What counts is the ratio of
    the two likelihoods of the score of the attacked model. A score that is
    near normal is `log(p / (1 - p))` of the probability p of the right class.

    Args:
        scores: array `[n]`, of the attacked model.
        is_member: bool array `[n]`, who it was trained on.
        shadow_scores: array `[models, n]`.
        shadow_is_member: bool array `[models, n]`. For each example, two shadow
            models of each kind at least.
        confidence: float, of the interval. Defaults to `0.95`.

    Returns:
        A `Membership`: the threshold is a ratio of 1.

    Raises:
        ValueError: if shapes do not fit, or there are too few shadow models.

    Reference:
        - [Carlini et al., 2022](https://arxiv.org/abs/2112.03570)
    """
    scores = np.asarray(scores, float)
    is_member = np.asarray(is_member, bool)
    shadow_scores = np.asarray(shadow_scores, float)
    inside = np.asarray(shadow_is_member, bool)
    n = len(scores)
    if (
        scores.ndim != 1
        or is_member.shape != (n,)
        or shadow_scores.ndim != 2
        or shadow_scores.shape[1] != n
        or inside.shape != shadow_scores.shape
    ):
        raise ValueError(
            "Expected scores [n], is_member [n], and shadow scores and members "
            f"[models, n], got shapes {list(scores.shape)}, "
            f"{list(is_member.shape)}, {list(shadow_scores.shape)} and "
            f"{list(inside.shape)}."
        )
    counts = inside.sum(0)
    if n == 0 or counts.min() < 2 or (len(inside) - counts).min() < 2:
        raise ValueError(
            "Expected two shadow models at least that were trained on each "
            "example, and two that were not. Train more of them, each on a "
            "random half."
        )
    if is_member.all() or not is_member.any():
        raise ValueError("Expected members and others, got one of them alone.")
    _check_finite(scores, shadow_scores)
    log_ratio = _log_likelihood(scores, shadow_scores, inside)
    log_ratio -= _log_likelihood(scores, shadow_scores, ~inside)
    return _membership(log_ratio, is_member, log_ratio >= 0, confidence)


def attack_features(logits, labels):
    """What attacks look at: losses, margins, and sorted probabilities.

    Args:
        logits: array `[n, classes]`, two classes at least.
        labels: int array `[n]`.

    Returns:
        Float array `[n, 3 + classes]`: the loss; the margin, by which the
        logit of the right class exceeds the largest other one; the score
        `log(p / (1 - p))` of the right class; and the log probabilities,
        largest first.

    Raises:
        ValueError: if shapes do not fit.
    """
    logits, labels = np.asarray(logits, float), np.asarray(labels)
    if (
        logits.ndim != 2
        or logits.shape[1] < 2
        or labels.shape != logits.shape[:1]
    ):
        raise ValueError(
            "Expected logits [n, classes] of two classes at least, and labels "
            f"[n], got shapes {list(logits.shape)} and {list(labels.shape)}."
        )
    rows = np.arange(len(logits))
    log_p = logits - np.logaddexp.reduce(logits, 1, keepdims=True)
    right = log_p[rows, labels]
    others = logits.copy()
    others[rows, labels] = -np.inf
    wrong = np.logaddexp.reduce(others, 1) - np.logaddexp.reduce(logits, 1)
    margin = logits[rows, labels] - others.max(1)
    return np.column_stack(
        [-right, margin, right - wrong, -np.sort(-log_p, axis=1)]
    )


def _log_likelihood(scores, shadow_scores, chosen):
    """Of normal scores with the mean and variance of chosen shadow models."""
    count = chosen.sum(0)
    means = np.where(chosen, shadow_scores, 0.0).sum(0) / count
    squares = np.where(chosen, (shadow_scores - means) ** 2, 0.0).sum(0)
    # One deviation for all examples where there are few models: more stable.
    deviations = np.sqrt(squares / np.maximum(count - 1, 1))
    if len(chosen) < 64:
        deviations = np.full_like(deviations, np.sqrt(np.mean(deviations**2)))
    deviations = np.maximum(deviations, _LEAST_DEVIATION)
    return -(((scores - means) / deviations) ** 2) / 2 - np.log(deviations)


def _balanced(members, others, seed):
    """Rows of equally many members and others, and who is a member."""
    members, others = (np.asarray(a, float) for a in (members, others))
    members, others = (
        a[:, None] if a.ndim == 1 else a for a in (members, others)
    )
    if members.ndim != 2 or members.shape[1:] != others.shape[1:]:
        raise ValueError(
            "Expected one row of numbers for each member and each other "
            f"example, got shapes {list(members.shape)} and "
            f"{list(others.shape)}."
        )
    count = min(len(members), len(others))
    if count < 4:
        raise ValueError(
            f"Expected four members and four others at least, got "
            f"{len(members)} and {len(others)}."
        )
    _check_finite(members, others)
    generator = np.random.default_rng(seed)
    rows = [a[generator.permutation(len(a))[:count]] for a in (members, others)]
    return np.concatenate(rows), np.repeat([True, False], count)


def _check_finite(*arrays):
    if not all(np.isfinite(a).all() for a in arrays):
        raise ValueError("Expected finite numbers, got NaN or infinite ones.")


def _halves(labels, seed):
    """Two halves with as many members as others."""
    return model_selection.train_test_split(
        np.arange(len(labels)),
        test_size=0.5,
        stratify=labels,
        random_state=seed,
    )


def _best_threshold(scores, labels):
    """From which score on members are more often said right than not."""
    order = np.argsort(-scores)
    ordered, is_member = scores[order], labels[order]
    # Between equal scores there is no threshold.
    last = np.append(ordered[1:] != ordered[:-1], True)
    gain = np.cumsum(np.where(is_member, 1, -1))[last]
    if gain.max() <= 0:
        return np.inf
    return ordered[last][np.argmax(gain)]


def _membership(scores, labels, predicted, confidence):
    right = int(np.sum(predicted == labels))
    fpr, tpr, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    return Membership(
        success=right / len(labels),
        interval=clopper_pearson(right, len(labels), confidence),
        confidence=confidence,
        auc=float(metrics.auc(fpr, tpr)),
        true_positive_rates={
            rate: float(tpr[fpr <= rate].max()) for rate in FALSE_POSITIVE_RATES
        },
        examples=len(labels),
    )
