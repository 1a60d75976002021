"""A linear head by one release: ridge regression on noisy second moments."""

import math

import numpy as np
import tensorflow as tf

from tf_dpsub import accounting
from tf_dpsub.checks import (
    check_fraction,
    check_noise_multiplier,
    check_positive,
    check_seed,
)
from tf_dpsub.heads import linear_head
from tf_dpsub.primitives import grid, noise
from tf_dpsub.primitives.release import SMALLEST_NORM
from tf_dpsub.training import (
    kept_features,
    requirements,
    run,
    step_errors,
    workers,
)

# The share of a contribution that is left for rounding: of sums in float64,
# and of the sum to the grid.
_MARGIN = 2.0**-20 + grid.MARGIN
_CHUNK = 4096


class PrivateRidge:
    """Solves for the head of a classifier from one noisy release.

    With features `f_i` in `R^k`, scaled down to norm 1 where they are longer
    than `radius`, and one-hot labels `e_i` less `1/K` for each of `K` classes,
    it releases `A = sum of f_i f_i^T` and `b = sum of f_i (e_i - 1/K)^T` with
    Gaussian noise, and solves `(A + lambda I) W = b`. There is no learning rate
    and there are no steps. Features should be whitened, as those of
    `tf_dpsub.models.image_features` with a rank.

    Formal guarantees: an example contributes the vector of
    `sqrt(share) f_i f_i^T`, whose entries off the diagonal count once with the
    factor `sqrt(2)`, and of `sqrt((1 - share) / (1 - 1/K)) f_i (e_i - 1/K)^T`.
    As `||f_i|| <= 1` and `||e_i - 1/K||^2 = 1 - 1/K`, its squared norm is
    `share ||f_i||^4 + (1 - share) ||f_i||^2 <= 1`. What is released is the sum
    of these vectors with noise of standard deviation `noise_multiplier` in each
    entry, on a public grid: one Gaussian event without sampling, which the
    ledger of the model records before. `A`, `b` and the head are computed from
    it. Examples whose features are not finite, or whose label is no class,
    contribute nothing. The regularisation follows from public numbers.

    Args:
        noise_multiplier: float, σ of the release. Defaults to `None`, the
            smallest that keeps `epsilon` at `delta` by PLD.
        epsilon: float. Defaults to `None`; required without
            `noise_multiplier`.
        delta: float. Defaults to `None`, as `epsilon`.
        radius: float, at least 1e-12, the norm to which features are clipped.
            Defaults to `1.0`, the public median norm of normalised features.
        share: float in (0, 1), of the squared norm for `A`. Defaults to `0.5`.
        regularization: float, `lambda` as a multiple of the expected spectral
            norm of the noise in `A`. Defaults to `0.3`.
        scale: float, by which the solution is multiplied, so that its outputs
            are logits. Defaults to `10.0`.
        seed: int, makes the noise reproducible, for experiments. Defaults to
            `None`, fresh entropy.
        secure_noise: bool, as for `tf_dpsub.optimizers.DPSGD`. Defaults to
            `False`.

    Raises:
        ValueError: if an argument is out of range, or neither or both of
            `noise_multiplier` and `epsilon` are given.

    Example:

    ```python
    model = tf_dpsub.make_private(
        tf_dpsub.models.feature_classifier(features, num_classes=10)
    )
    tf_dpsub.heads.PrivateRidge(epsilon=0.2, delta=1e-5).fit(model, x, y)
    print(model.privacy_statement(delta=1e-5))
    ```

    Reference:
        - [Wang, 2018](https://arxiv.org/abs/1803.02596), AdaSSP
        - [Mehta et al., 2023](https://arxiv.org/abs/2211.13403), DP-LS
    """

    def __init__(
        self,
        *,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        radius: float = 1.0,
        share: float = 0.5,
        regularization: float = 0.3,
        scale: float = 10.0,
        seed: int | None = None,
        secure_noise: bool = False,
    ):
        if epsilon is not None and noise_multiplier is None:
            if delta is None:
                raise ValueError("Expected delta with epsilon, got None.")
            noise_multiplier = accounting.noise_multiplier(
                epsilon=epsilon,
                delta=delta,
                sampling_rate=1.0,
                steps=1,
                accountant="pld",
            )
        elif epsilon is not None or noise_multiplier is None:
            raise ValueError(
                "Expected either noise_multiplier or epsilon, got "
                f"{noise_multiplier} and {epsilon}."
            )
        check_noise_multiplier(noise_multiplier)
        if not SMALLEST_NORM <= radius < math.inf:
            raise ValueError(
                f"Expected finite radius >= {SMALLEST_NORM}, got {radius}."
            )
        check_fraction("share", share)
        check_positive("regularization", regularization)
        check_positive("scale", scale)
        check_seed(seed)
        self.noise_multiplier = float(noise_multiplier)
        self.radius, self.share = float(radius), float(share)
        self.regularization, self.scale = float(regularization), float(scale)
        self.secure_noise = bool(secure_noise)
        self._seed = seed
        self._noise_key = noise.NoiseKey(seed)

    def fit(self, model, x, y):
        """Replaces the head of a private model by the solution.

        Args:
            model: `tf_dpsub.PrivateModel` of a
                `tf_dpsub.models.feature_classifier`.
            x: array, or structure of arrays, private inputs.
            y: int array `[examples]`, labels.

        Raises:
            ValueError: if the model is no such classifier, if labels are no
                integers, if lengths differ, or in one of several workers.
            RuntimeError: if a call of `fit` of the model is in progress.
        """
        run.require_none(model)
        self._noise_key.require_own_process()
        head = linear_head.on_features(model.model)
        _require_one_worker(model)
        y = np.asarray(y).reshape(-1)
        if y.dtype.kind not in "biu":
            raise ValueError(
                f"Expected labels that are integers, got {y.dtype}. Pass the "
                "numbers of the classes, not one-hot vectors."
            )
        x = model.preprocessed((x,))[0]
        features, assumptions = _features(model, x)
        if len(features) != len(y):
            raise ValueError(
                f"Expected a label for each of {len(features)} examples, got "
                f"{len(y)}."
            )
        self._charge(model, x, len(y), assumptions)
        classes = head.kernel.shape[1]
        head.kernel.assign(self._kernel(features, y, classes))
        if head.bias is not None:
            head.bias.assign(np.zeros(classes))
        model._carried_ledger.end_epoch()

    def _charge(self, model, x, examples, assumptions):
        stated = requirements.stated_origins(model, x)
        entry = accounting.LedgerEntry(
            mechanism=type(self).__name__,
            noise_multiplier=self.noise_multiplier,
            l2_norm_clip=1.0,
            batch_size=examples,
            examples=examples,
            sampler="batches",
            fixed_seed=self._seed is not None,
            notes=(
                *requirements.public_assumptions(model.model),
                *assumptions,
                *stated["notes"],
            ),
            uncovered=(
                *stated["uncovered"],
                *model._carried_ledger.uncovered(),
            ),
        )
        model.ledger.require_unit(entry.unit)
        model.ledger.charge(entry, 1)
        model.ledger.settle()
        model._carried_ledger.begin_step()

    def _kernel(self, features, labels, classes):
        """The head `[k, K]` by a release that is charged elsewhere."""
        sums = self._sums(features, labels, classes)
        moments, products = self._released(sums, features.shape[1], classes)
        return self._solution(moments, products)

    def _sums(self, features, labels, classes):
        """The sum of all contributions, a float64 vector."""
        return sum(
            self._contributions(
                features[start : start + _CHUNK],
                labels[start : start + _CHUNK],
                classes,
            )
            for start in range(0, len(labels), _CHUNK)
        )

    def _contributions(self, features, labels, classes):
        """Sum of the contributions of a few examples.

        Args:
            features: array `[rows, k]`.
            labels: int array `[rows]`.
            classes: int, `K`.

        Returns:
            float64 array `[k (k + 1) / 2 + k K]`.
        """
        features = features.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.linalg.norm(features, axis=1)
        counts = (labels >= 0) & (labels < classes) & np.isfinite(norms)
        factors = 1 / np.maximum(np.where(counts, norms, 1.0), self.radius)
        # Two of them are multiplied, and each is left room.
        factors *= 1 - _MARGIN
        features = np.where(counts[:, None], features, 0.0) * factors[:, None]
        targets = np.eye(classes)[np.where(counts, labels, 0)] - 1 / classes
        moments = math.sqrt(self.share) * features.T @ features
        products = (
            math.sqrt((1 - self.share) / (1 - 1 / classes))
            * features.T
            @ targets
        )
        upper = np.triu_indices(len(moments), 1)
        return np.concatenate(
            [np.diag(moments), math.sqrt(2) * moments[upper], products.ravel()]
        )

    def _released(self, sums, rank, classes):
        """Noisy second moments `[k, k]` and products `[k, K]`."""
        if self.noise_multiplier > 0:
            spacing = grid.spacing(self.noise_multiplier, 1.0, len(sums))
            (noisy,) = noise.noisy(
                self._noise_key.advance(),
                [tf.constant(sums)],
                [grid.GridNoise(self.noise_multiplier, spacing)],
                self.secure_noise,
                "float64",
            )
            sums = noisy.numpy()
        pairs = rank * (rank - 1) // 2
        diagonal, upper, products = np.split(sums, [rank, rank + pairs])
        moments = np.zeros((rank, rank))
        moments[np.triu_indices(rank, 1)] = upper / math.sqrt(2)
        moments += moments.T + np.diag(diagonal)
        moments /= math.sqrt(self.share)
        products /= math.sqrt((1 - self.share) / (1 - 1 / classes))
        return moments, products.reshape(rank, classes)

    def _solution(self, moments, products):
        rank = len(moments)
        # The spectral norm of a symmetric Gaussian matrix (Wigner).
        norm = self.noise_multiplier * math.sqrt(2 * rank / self.share)
        values, vectors = np.linalg.eigh(moments)
        values = np.maximum(values, 0.0) + self.regularization * norm
        # Without noise, what no example has is not divided by zero.
        values = np.maximum(values, 1e-9 * values.max())
        solution = vectors @ ((vectors.T @ products) / values[:, None])
        # Of features as they are: within the radius they were divided by it.
        return self.scale / self.radius * solution


def _require_one_worker(model):
    """Refuses several workers: each would release the data by itself."""
    if workers.is_one_of_several(model.distribute_strategy):
        raise ValueError(
            "Expected one process for PrivateRidge, got one of several "
            "workers: each would make a release of its own, of which the "
            "ledger counts one. Solve for the head in one process."
        )


def _features(model, x):
    """Features of all examples `[examples, k]`, and what they rest on."""
    features = kept_features.KeptFeatures(model.model)
    try:
        (kept,) = features.of(x)[kept_features.KEY]
        rows = np.array(kept).reshape(len(kept), -1)
    except tf.errors.InvalidArgumentError as error:
        quiet = step_errors.without_values(error)
        if quiet is None:
            raise
        raise quiet from None
    finally:
        features.close()
    return rows, features.assumptions
