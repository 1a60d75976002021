"""Batches whose last example is hard for a mechanism.

They are the neighbouring batches among which a search looks for an example that
moves what is released by more than is claimed.
"""

import numpy as np

from tf_dpsub.auditing.step_audit import INPUTS, sq_norms


def hard_batch(audit, generator, k: int) -> tuple:
    """A batch whose last example is of one of the hard kinds.

    Args:
        audit: `tf_dpsub.auditing.step_audit.StepAudit`.
        generator: `numpy.random.Generator`.
        k: int, which kind, counted round and round.

    Returns:
        Tuple of inputs and targets.
    """
    x, y = audit.random(generator, _scale(audit, generator))
    kinds = (
        _huge, _tiny, _denormal, _not_finite, _one_kernel, _repeated,
        _at_the_clip, _alternating, _nothing_else, _opposed,
    )  # fmt: skip
    return kinds[k % len(kinds)](audit, x, y, generator)


def _scale(audit, generator):
    clip = audit.optimizer.l2_norm_clip
    return clip * float(generator.choice([1e-3, 0.5, 1.0, 3.0, 1e3, 1e8]))


def _huge(audit, x, y, generator):
    x[-1] *= np.float32(generator.choice([1e6, 1e15, 1e18]))
    return x, y


def _tiny(audit, x, y, generator):
    y[-1] *= np.float32(1e-18)
    return x, y


def _denormal(audit, x, y, generator):
    x[-1] = np.float32(1e-42)
    y[-1] = np.float32(generator.choice([1.0, 1e-3, 1e30]))
    return x, y


def _not_finite(audit, x, y, generator):
    x[-1, int(generator.integers(x.shape[1]))] = generator.choice(
        [np.nan, np.inf, -np.inf, 3e38]
    )
    return x, y


def _one_kernel(audit, x, y, generator):
    x[-1].reshape(audit.views, -1)[:, : INPUTS[0]] = 0
    x[-1] *= np.float32(1e3)
    return x, y


def _repeated(audit, x, y, generator):
    x[:], y[:] = x[-1], y[-1]
    return x, y


def _at_the_clip(audit, x, y, generator):
    """Norms of the clip, or of the nearest float on either side."""
    norms = np.sqrt(sq_norms(x.astype(float), y.astype(float)))
    nudge = 1 + generator.choice([-1, 0, 1]) * 2.0**-23
    y *= (audit.optimizer.l2_norm_clip * nudge / norms)[:, None]
    return x, y.astype(np.float32)


def _alternating(audit, x, y, generator):
    """Rows each of which rounds the float32 sum anew."""
    x[:], y[:] = x[:1], y[:1]
    y[::2] *= np.float32(1 + 2.0**-11)
    y[-1] *= np.float32(2.0)
    return x, y


def _nothing_else(audit, x, y, generator):
    x[:-1] = 0
    return x, y


def _opposed(audit, x, y, generator):
    x[:-1] = -x[-1] / np.float32(len(x) - 1)
    y[:-1] = y[-1]
    return x, y


def mutated(batch: tuple, generator) -> tuple:
    """A random change of a batch.

    Args:
        batch: tuple of inputs and targets.
        generator: `numpy.random.Generator`.
    """
    x, y = (a.copy() for a in batch)
    rows = slice(-1, None) if generator.random() < 0.5 else slice(None)
    part = x if generator.random() < 0.5 else y
    size = generator.choice([2.0**-20, 1e-3, 0.3])
    with np.errstate(all="ignore"):
        part[rows] *= (
            1 + size * generator.normal(size=part[rows].shape)
        ).astype(np.float32)
        if generator.random() < 0.3:
            part[rows] *= np.float32(generator.choice([0.5, 2.0, 100.0]))
    return x, y


class Climb:
    """Gradient ascent on how far the last example moves what is released.

    Args:
        audit: `tf_dpsub.auditing.step_audit.StepAudit`.
        generator: `numpy.random.Generator`, for the starting points.
    """

    _STEPS = 30

    def __init__(self, audit, generator):
        self._audit = audit
        self._generator = generator
        self._begin()

    def _begin(self):
        clip = self._audit.optimizer.l2_norm_clip
        scale = clip * float(self._generator.choice([0.03, 0.3, 1.0, 30.0]))
        self._batch = self._audit.random(self._generator, scale)
        self._ascent = None
        self._moved, self._size, self._remaining = -1.0, 0.3, self._STEPS

    def next_batch(self):
        """The batch whose movement `tell` has to be told next."""
        if self._remaining == 0:
            self._begin()
        self._remaining -= 1
        if self._moved < 0:
            return self._batch
        if self._ascent is None:
            self._ascent = self._audit.ascent(self._batch)
        return tuple(
            _along(a, g, self._size) for a, g in zip(self._batch, self._ascent)
        )

    def tell(self, batch, moved):
        """Accepts a step if it moves further, else shrinks the next one.

        Args:
            batch: tuple, what `next_batch` returned.
            moved: float, how far it moves what is released.
        """
        if moved > self._moved:
            self._batch, self._moved, self._ascent = batch, moved, None
        else:
            self._size /= 4


def _along(array, gradient, size):
    norm = np.linalg.norm(gradient.astype(float))
    if norm == 0:
        return array
    step = size * np.linalg.norm(array.astype(float)) / norm
    return (array + step * gradient).astype(np.float32)
