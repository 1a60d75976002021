"""Accuracies of approaches, simulated on public examples that are held out."""

import dataclasses
import itertools

import keras
import numpy as np

from tf_dpsub.heads import public_ridge
from tf_dpsub.planning import representations, simulated_heads
from tf_dpsub.training.public_training import fit_public

# Labelled public examples in parts, each of which is held out once; of more
# than so many, one part is enough.
_PARTS = 5
_MANY_LABELLED = 600
# The parts on which all layers are trained, which takes longer.
_PARTS_OF_LAYERS = 1
# The order of rules stands unless a difference is so many standard errors: it
# is the largest of about twenty.
_DECIDED = 3.0


class HeldOutAccuracies:
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
