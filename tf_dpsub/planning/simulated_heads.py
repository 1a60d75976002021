"""Private heads, simulated on public features.

Nothing here is private: noise is that of a seeded generator.
"""

import numpy as np

from tf_dpsub.heads import PrivateRidge


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
    (kernel,) = full_batches(features, labels, start, [head], [generator])
    return kernel


def full_batches(features, labels, start, heads, generators):
    """Trains several heads as `full_batch` would, each apart from the others.

    A step reads all features: for many heads in hardly more time than for one.

    Args:
        features, labels, start: as `full_batch`.
        heads: list of `tf_dpsub.heads.FullBatch`.
        generators: list of `numpy.random.Generator`, one for each head.

    Returns:
        List of arrays `[k, classes]`.
    """
    features = np.asarray(features, np.float32)
    examples, size = features.shape
    targets = np.eye(start.shape[1], dtype=np.float32)[labels][:, None]
    # Without a copy of all features.
    lengths = np.sqrt(np.einsum("ij,ij->i", features, features))[:, None]
    # Those that end first are last, so that the others lie together.
    order = sorted(range(len(heads)), key=lambda i: -heads[i].steps)
    heads = [heads[i] for i in order]
    generators = [generators[i] for i in order]
    clips = np.array([h.l2_norm_clip for h in heads], np.float32)
    # Of each number, one for each head; kernels `[k, heads, classes]`.
    rates, momenta, deviations = (
        np.array(values, np.float32)[:, None]
        for values in (
            [h.learning_rate / h.l2_norm_clip for h in heads],
            [h.momentum for h in heads],
            [h.noise_multiplier * h.l2_norm_clip / h.examples for h in heads],
        )
    )
    kernels = np.repeat(np.array(start, np.float32)[:, None], len(heads), 1)
    velocities = np.zeros_like(kernels)
    for step in range(heads[0].steps):
        going = sum(h.steps > step for h in heads)
        kernel = kernels[:, :going]
        logits = features @ kernel.reshape(size, -1)
        errors = softmax(logits.reshape(examples, going, -1)) - targets
        # The gradient of an example is an outer product.
        norms = lengths * np.linalg.norm(errors, axis=-1)
        clip = clips[:going]
        errors *= (clip / np.maximum(norms, clip))[..., None]
        gradient = features.T @ errors.reshape(examples, -1) / examples
        gradient = gradient.reshape(kernel.shape)
        noise = [
            g.standard_normal(start.shape, np.float32)
            for g in generators[:going]
        ]
        gradient += deviations[:going] * np.stack(noise, 1)
        velocity = velocities[:, :going]
        velocity *= momenta[:going]
        velocity -= rates[:going] * gradient
        kernel += velocity
    return [kernels[:, order.index(i)] for i in range(len(heads))]


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
    ridge = PrivateRidge(noise_multiplier=noise_multiplier, seed=seed)
    return ridge._kernel(np.asarray(features), labels, classes)


def is_right(kernel, features, labels):
    """Whether a head tells the class of each example, `[examples]`.

    Args:
        kernel: array `[k, classes]`.
        features: array `[examples, k]`.
        labels: int array `[examples]`.
    """
    return np.argmax(features @ kernel, axis=1) == labels


def softmax(logits):
    """Probabilities, of logits with the classes last."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
