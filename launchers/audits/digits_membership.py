"""Membership inference against models that are trained on digits."""

import dataclasses

import numpy as np

EPOCHS, BATCH_SIZE = 100, 100
# Column of the feature whose distribution is closest to a normal one.
_SCORE = 2
_PUBLIC = 100


@dataclasses.dataclass(frozen=True)
class Attacks:
    """Attacks on one model, each a `tf_dpsub.auditing.Membership`.

    Attributes:
        loss_threshold: attack by the loss alone.
        classifier: attack by a logistic regression on losses, margins and
            probabilities.
        likelihood_ratio: attack by shadow models; None without any.
    """

    loss_threshold: object
    classifier: object
    likelihood_ratio: object = None


def attacked(train, shadow_models=0):
    """Attacks a model that is trained on a random half of digits.

    Half of the digits have random labels. Real labels are too easy: a model
    predicts them for an example that it has not seen. Random labels can only be
    memorized.

    Args:
        train: function of images, labels and a seed that returns a trained
            Keras model, which gives logits.
        shadow_models: int, number of further models that it trains, each on a
            random half, for the likelihood ratio attack: four at least, or
            none. Defaults to `0`.

    Returns:
        An `Attacks`.
    """
    from tf_dpsub import auditing

    x, y = _digits()
    halves = _random_halves(len(y), 1 + shadow_models)
    features = [
        auditing.attack_features(
            train(x[half], y[half], seed).predict(x, verbose=0), y
        )
        for seed, half in enumerate(halves)
    ]
    target_features, half = features[0], halves[0]
    likelihood_ratio = None
    if shadow_models:
        likelihood_ratio = auditing.likelihood_ratio_attack(
            target_features[:, _SCORE],
            half,
            np.stack([f[:, _SCORE] for f in features[1:]]),
            halves[1:],
        )
    members, others = target_features[half], target_features[~half]
    return Attacks(
        auditing.loss_threshold_attack(members[:, 0], others[:, 0]),
        auditing.classifier_attack(members, others),
        likelihood_ratio,
    )


def public_examples():
    """Digits that no model is trained on, with their labels."""
    import tf_dpsub

    loaded = tf_dpsub.data.load("digits")
    return loaded.x_test[:_PUBLIC], loaded.y_test[:_PUBLIC]


def _digits():
    import tf_dpsub

    loaded = tf_dpsub.data.load("digits")
    generator = np.random.default_rng(0)
    count = len(loaded.y_train)
    random = generator.integers(0, loaded.num_classes, count)
    is_random = generator.random(count) < 0.5
    return loaded.x_train, np.where(is_random, random, loaded.y_train)


def _random_halves(count, models):
    """Random training sets: a bool array `[models, count]`.

    Shadow models come in pairs with complementary sets.
    """
    generator = np.random.default_rng(1)
    halves = []
    while len(halves) < models:
        order = generator.permutation(count)
        half = order < count // 2
        # Each example is then in half of the training sets.
        halves += [half, ~half] if halves else [half]
    return np.array(halves[:models])
