"""The search for a method: mechanisms, tried on public examples alone."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import tree

from tf_dpsub import layers, optimizers, subspaces
from tf_dpsub.methods import METHODS
from tf_dpsub.planning.settings import SearchSpace, Simulation
from tf_dpsub.planning.signals import Signal, SignalMeter, mean_signal
from tf_dpsub.planning.step_cost import StepCost, measure_step
from tf_dpsub.training.private_model import make_private

# Clips that are tried, relative to the median norm of public gradients.
_CLIPS = (0.1, 0.3, 1.0)
# Of the clip of embeddings, as usual for GEP.
_RESIDUAL_CLIP = 0.2
_BATCHES = 8
# Public examples up to which eigenspaces are computed exactly.
_FEW = 512
# Power iterations by which carriers follow weights that have moved at once.
_CATCHING_UP = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method with its settings, and what is expected of it.

    Attributes:
        method: string, one of `"DP-SGD"`, `"PDP-SGD"`, `"B-GEP"`, `"GEP"` and
            `"RGP"`.
        rank: int, number of directions, or of carriers; None where it has none.
        l2_norm_clip: float.
        noise_multiplier: float, the one to give to the optimizer.
        snr: float, signal-to-noise ratio of a step, of energies.
        alignment: float, the cosine between the gradient and the mean of what
            the run releases, in [0, 1].
        kept: float, the share of the gradient's energy in what is released,
            before noise: 1 less the error of the projection and of the clip.
        signal: `Signal`, mean over the simulated training.
        cost: `StepCost`, or None where it was not measured.
    """

    method: str
    rank: int | None
    l2_norm_clip: float
    noise_multiplier: float
    snr: float
    alignment: float
    kept: float
    signal: Signal
    cost: StepCost | None = None

    @property
    def name(self):
        if self.rank is None:
            return self.method
        letter = "r" if METHODS[self.method].needs_carriers else "k"
        return f"{self.method}, {letter} = {self.rank}"

    @property
    def residual_norm_clip(self):
        """Clip of GEP's residuals, as a float; None of other methods."""
        if METHODS[self.method].has_residual:
            return _RESIDUAL_CLIP * self.l2_norm_clip
        return None


class Search:
    """Measures the signals of mechanisms along simulated trainings.

    Args:
        model: built plain `keras.Model`. Its weights change.
        loss: as for `keras.Model.compile`.
        space: `SearchSpace`.
        simulation: `Simulation`.
        batch_size: int, of the run.
        noise_multiplier: float, the effective one of the run.
        steps: int, of the run.
        seed: int.

    Attributes:
        median_norm: float, of public gradients at the initial weights.
    """

    def __init__(
        self,
        model,
        loss,
        space: SearchSpace,
        simulation: Simulation,
        *,
        batch_size: int,
        noise_multiplier: float,
        steps: int,
        seed: int,
    ):
        self._model, self._loss = model, loss
        self._space, self._simulation = space, simulation
        self._inner = keras.optimizers.get(simulation.optimizer)
        self._batch_size = batch_size
        self._noise_multiplier = noise_multiplier
        self._steps = steps
        self._seed = seed
        self._clips: list = []
        # By method, rank and clip.
        self._signals: dict = {}
        self._effective_multipliers: dict = {}

    def run(self, x, y, measure_cost: bool) -> list[Candidate]:
        """Tries all methods on all splits of the public examples.

        Args:
            x: array, or structure of arrays, public examples.
            y: the same for targets.
            measure_cost: bool, whether steps are timed, and their memory
                measured.

        Returns:
            List of `Candidate`.

        Raises:
            ValueError: if there are too few examples, or their gradients show
                no common direction.
        """
        weights = self._model.get_weights()
        splits = self._simulation.splits
        for k in range(splits):
            self._take_split(x, y, self._seed + k)
            self._train()
            for method in self._space.methods:
                logging.info(
                    "Looking at %s, split %d of %d.", method, k + 1, splits
                )
                self._try_method(method)
            self._model.set_weights(weights)
        candidates = self._candidates()
        if measure_cost:
            candidates = self._with_costs(candidates)
        _check_gradient(candidates)
        return candidates

    # The simulated training.

    def _take_split(self, x, y, seed):
        """Splits the public examples; the first split sets the clips."""
        self._trained, self._batches = _split(
            x, y, self._simulation.held_out, seed
        )
        self._basis = self._space.basis or self._trained
        plain = optimizers.DPSGD(
            "sgd",
            noise_multiplier=0.0,
            l2_norm_clip=math.inf,
            batch_size=self._batch_size,
        )
        self._gradients = self._meter([plain])
        if not self._clips:
            self.median_norm = self._median_norm()
            self._clips = sorted(
                self._space.clips
                or [_rounded(c * self.median_norm) for c in _CLIPS]
            )

    def _train(self):
        """Trains on public examples as noisily as the run; keeps weights."""
        steps = min(self._steps, self._simulation.simulated_steps)
        ends = np.linspace(0, steps, self._simulation.points)
        ends = ends.round().astype(int)
        simulated = self._simulated()
        self._path = [self._model.get_weights()]
        for first, last in zip(ends, ends[1:]):
            if last > first:
                simulated.fit(
                    *self._trained, steps_per_epoch=int(last - first), verbose=0
                )
                self._path.append(self._model.get_weights())

    def _median_norm(self):
        """Median norm of the gradients of public examples, at the start."""
        step = self._gradients.model.training_step

        @tf.function(autograph=False, jit_compile=step.is_compiled)
        def batch_norms(batch):
            gradients, _ = step.per_example_gradients(batch)
            return tf.sqrt(gradients.sq_norms())

        norms = []
        for batch in self._batches:
            size = len(tree.flatten(batch["x"])[0])
            norms.append(batch_norms(batch | {"real": tf.ones([size])}))
        median = float(np.median(np.concatenate(norms)))
        if not 0 < median < math.inf:
            raise ValueError(
                "Expected public examples with finite gradients, not all zero, "
                f"got norms with the median {median}."
            )
        return median

    def _simulated(self):
        """A private model whose steps are as noisy as those of the run."""
        count = len(tree.flatten(self._trained[0])[0])
        batch_size = min(count, self._batch_size)
        model = make_private(self._model)
        model.compile(
            optimizers.DPSGD(
                self._new_inner(),
                noise_multiplier=self._noise_multiplier
                * batch_size
                / self._batch_size,
                l2_norm_clip=self._simulation.l2_norm_clip or self._clips[0],
                batch_size=batch_size,
                seed=self._seed,
            ),
            loss=self._loss,
        )
        return model

    # Mechanisms.

    def _try_method(self, method):
        """Measures the signals of a method, with all ranks and clips."""
        if METHODS[method].needs_carriers:
            for rank in self._space.carrier_ranks:
                self._try_carriers(method, rank)
        elif not METHODS[method].needs_subspace:
            self._try(method, None)
        else:
            for rank in self._space.ranks:
                if rank <= self._largest_rank:
                    self._try(method, rank)
                    continue
                logging.info(
                    "%s with k = %d is left out: of %d public examples or "
                    "weights there are no more directions.",
                    method,
                    rank,
                    self._largest_rank,
                )

    @property
    def _largest_rank(self):
        count = len(tree.flatten(self._basis[0])[0])
        weights = sum(math.prod(v.shape) for v in self._model.trainable_weights)
        return min(count, weights)

    def _try_carriers(self, method, rank):
        try:
            self._reparametrize(rank)
        except ValueError as error:
            logging.info("%s with rank %d is left out. %s", method, rank, error)
            return
        try:
            self._try(method, rank)
        finally:
            layers.merge(self._model)

    def _reparametrize(self, rank):
        layers.reparametrize(self._model, rank, **(self._space.carriers or {}))

    def _try(self, method, rank):
        optimizers = self._optimizers(method, rank, self._clips)
        meter = self._meter(optimizers)
        for k, weights in enumerate(self._path):
            self._model.set_weights(weights)
            if METHODS[method].needs_carriers:
                _follow(meter, is_start=k == 0)
            signals = meter.measure(self._gradients.means()[0])
            for optimizer, signal in zip(optimizers, signals):
                key = method, rank, optimizer.l2_norm_clip
                self._signals.setdefault(key, []).append(signal)
                self._effective_multipliers[key] = (
                    optimizer.effective_noise_multiplier
                )

    def _meter(self, optimizers):
        return SignalMeter(self._model, self._loss, optimizers, self._batches)

    def _optimizers(self, method, rank, clips):
        """One optimizer for each clip, with noise multiplier 1."""
        method = METHODS[method]
        make = getattr(optimizers, method.optimizer)
        kwargs = dict(method.kwargs)
        if method.needs_subspace:
            kwargs["subspace"] = self._subspace(rank)
        by_clip = []
        for clip in clips:
            if method.has_residual:
                kwargs["residual_norm_clip"] = _RESIDUAL_CLIP * clip
            by_clip.append(
                make(
                    self._new_inner(),
                    noise_multiplier=1.0,
                    l2_norm_clip=clip,
                    batch_size=self._batch_size,
                    **kwargs,
                )
            )
        return by_clip

    def _new_inner(self):
        return type(self._inner).from_config(self._inner.get_config())

    def _subspace(self, rank):
        count = len(tree.flatten(self._basis[0])[0])
        return subspaces.PublicSubspace(
            *self._basis,
            rank=rank,
            groups=self._space.groups,
            method="gram" if count <= _FEW else "power",
            seed=self._seed,
        )

    # Results.

    def _candidates(self):
        sigma, batch_size = self._noise_multiplier, self._batch_size
        candidates = []
        for key, signals in self._signals.items():
            method, rank, clip = key
            signal = mean_signal(signals)
            candidates.append(
                Candidate(
                    method=method,
                    rank=rank,
                    l2_norm_clip=clip,
                    noise_multiplier=sigma / self._effective_multipliers[key],
                    snr=signal.snr(sigma, batch_size),
                    alignment=signal.alignment(sigma, batch_size, self._steps),
                    kept=signal.alignment(0.0, 10**9, 1) ** 2,
                    signal=signal,
                )
            )
        return candidates

    def _with_costs(self, candidates):
        """Measures the step of each method and rank, with its best clip."""
        clips = {
            (c.method, c.rank): c.l2_norm_clip
            for c in sorted(candidates, key=lambda c: c.alignment)
        }
        costs = {key: self._cost(*key, clip) for key, clip in clips.items()}
        return [
            dataclasses.replace(c, cost=costs[c.method, c.rank])
            for c in candidates
        ]

    def _cost(self, method, rank, clip):
        if METHODS[method].needs_carriers:
            self._reparametrize(rank)
        try:
            (optimizer,) = self._optimizers(method, rank, [clip])
            model = make_private(self._model)
            model.compile(optimizer, loss=self._loss)
            return measure_step(model, *self._trained)
        finally:
            if METHODS[method].needs_carriers:
                layers.merge(self._model)


def _split(x, y, held_out, seed):
    """Public examples to train on, and batches of those held out."""
    count = len(tree.flatten(x)[0])
    if y is None or len(tree.flatten(y)[0]) != count:
        raise ValueError(
            f"Expected targets for the {count} public examples, got "
            f"{'none' if y is None else len(tree.flatten(y)[0])}: the model is "
            "trained on them as on private ones. Images with random labels go "
            "to `basis`."
        )
    held_out_count = round(held_out * count)
    size = held_out_count // _BATCHES
    if size < 2 or count - held_out_count < 2:
        raise ValueError(
            f"Expected {2 * _BATCHES} public examples at least to hold out, "
            f"and two to train on, got {count} with held_out={held_out}."
        )
    order = np.random.default_rng(seed).permutation(count)
    trained, measured = order[held_out_count:], order[: size * _BATCHES]

    def take(indices):
        return tree.map_structure(lambda a: np.asarray(a)[indices], (x, y))

    batches = [
        tree.map_structure(tf.convert_to_tensor, {"x": part[0], "y": part[1]})
        for part in map(take, np.split(measured, _BATCHES))
    ]
    return take(trained), batches


def _check_gradient(candidates):
    """Refuses examples that do not show the gradient, which all share."""
    if candidates and not candidates[0].signal.gradient > 0:
        raise ValueError(
            "Expected public examples whose gradients have a direction in "
            "common, got none that so few show. Hold out more of them "
            "(held_out), or average over splits."
        )


def _follow(meter, is_start):
    """Lets carriers catch up with weights that have moved."""
    optimizer = meter.optimizers[0]
    iterations = 0 if is_start else optimizer.warmup_steps
    optimizer.iterations.assign(iterations)
    for _ in range(1 if is_start else _CATCHING_UP):
        meter.prepare()


def _rounded(clip):
    """The clip to two significant digits."""
    return float(f"{clip:.1e}")
