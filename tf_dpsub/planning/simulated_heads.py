"""Private heads, simulated on public features.

Nothing here is private: noise is that of a seeded generator.
"""

import numpy as np

from tf_dpsub import heads


def full_batch(features, labels, start, head, generator):
    """Trains a head as `heads.FullBatch` would, with the noise of its run.

    Noise is added to the mean gradient with the standard deviation that it has
    in the mean over the examples of the run, however few stand for these.

    Args:
        features: array `[examples, k]`.
        labels: int array `[examples]`.
        start: array `[k, classes]`.
        head: `tf_dpsub.heads.FullBatch`, whose examples are those of the run.
        generator: `numpy.random.Generator`.

    Returns:
        Array `[k, classes]`.
    """
    features = np.asarray(features, np.float32)
    kernel = np.array(start, np.float32)
    velocity = np.zeros_like(kernel)
    targets = np.eye(kernel.shape[1], dtype=np.float32)[labels]
    lengths = np.linalg.norm(features, axis=1)
    clip = head.l2_norm_clip
    deviation = np.float32(head.noise_multiplier * clip / head.examples)
    rate = np.float32(head.learning_rate / clip)
    for _ in range(head.steps):
        errors = _softmax(features @ kernel) - targets
        # The gradient of an example is an outer product.
        norms = lengths * np.linalg.norm(errors, axis=1)
        errors *= (clip / np.maximum(norms, clip))[:, None]
        gradient = features.T @ errors / len(features)
        gradient += deviation * generator.standard_normal(
            kernel.shape, np.float32
        )
        velocity = head.momentum * velocity - rate * gradient
        kernel += velocity
    return kernel


def private_ridge(features, labels, classes, noise_multiplier, seed):
    """Solves for a head as `heads.PrivateRidge` would.

    Args:
        features: array `[examples, k]`.
        labels: int array `[examples]`.
        classes: int.
        noise_multiplier: float, relative to sums over these examples.
        seed: int.

    Returns:
        Array `[k, classes]`.
    """
    ridge = heads.PrivateRidge(noise_multiplier=noise_multiplier, seed=seed)
    return ridge._kernel(np.asarray(features), labels, classes)


def is_right(kernel, features, labels):
    """Whether a head tells the class of each example, `[examples]`.

    Args:
        kernel: array `[k, classes]`.
        features: array `[examples, k]`.
        labels: int array `[examples]`.
    """
    return np.argmax(features @ kernel, axis=1) == labels


def _softmax(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)
