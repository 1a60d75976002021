"""RGP and RGP-random: gradients through low-rank carriers.

Implementation of "Large Scale Private Learning via Low-rank Reparametrization"
(Yu, Zhang, Chen, Yin, Liu, ICML 2021, Algorithms 1 and 2).
"""

import keras
import tensorflow as tf

from tf_dpsub.checks import check_count, is_int
from tf_dpsub.layers import reparametrized_layers
from tf_dpsub.optimizers.dpsgd import DPSGD
from tf_dpsub.subspaces import linear_algebra
from tf_dpsub.subspaces.subspace import assign_if, seed_variable

_CARRIERS = ("history", "weight", "random")
_STARTS = ("warm", "gaussian")
# Share of random directions in each column of a product: they take the place
# of what has no direction.
_FILL = 2.0**-20


@keras.saving.register_keras_serializable("tf_dpsub")
class RGP(DPSGD):
    """DP-SGD on low-rank gradient carriers of the layers' kernels.

    For each kernel W `[p, d]` of a layer that `tf_dpsub.layers.reparametrize`
    converted, a step takes orthonormal L `[p, r]` and R `[r, d]`, the nearest
    to the history `W - W_0` of what training has done so far. The gradients
    with respect to L and R of an example, and those of all other trainable
    weights, are clipped together, added up, and get noise. With the noisy
    means,

    `dW = dL R + L dR - L L^T dL R`

    is the gradient of W in the space of matrices that share the columns of L or
    the rows of R, of which it is the orthogonal projection, if there is no
    noise. The inner optimizer sees gradients of whole kernels. There is noise
    in `r (p + d)` numbers instead of `p d`, and per-example gradients take as
    much memory.

    Formal guarantees: what is released at a step is the noisy sum of the
    gradients of all carriers and of the other weights. L and R are computed
    from released weights and public randomness. If one example is replaced by
    an empty one, the sum moves by at most `C = l2_norm_clip` in Euclidean
    norm: all parts are clipped as one vector. A step is accounted for by one
    Gaussian event of multiplier `sigma`; the gradients of the kernels follow
    from the release by post-processing. Orthonormality is not relied upon.

    Args: as `PrivateOptimizer`.
        carriers: string, what they follow: `"history"`, W itself (`"weight"`),
            or `"random"`, drawn anew at each step, which is RGP-random.
            Defaults to `"history"`.
        warmup_steps: int, for `"history"`, the number of steps for which they
            follow W, while there is no history to speak of. Defaults to `100`.
        power_iterations: int, number of power iterations at a step. Defaults
            to `1`.
        start: string, where these start: from the last R (`"warm"`), or from a
            random one (`"gaussian"`). Defaults to `"warm"`.

    Example:

    ```python
    tf_dpsub.layers.reparametrize(classifier, rank=8)
    model = tf_dpsub.make_private(classifier)
    model.compile(
        tf_dpsub.optimizers.RGP(
            keras.optimizers.Adam(1e-3),
            l2_norm_clip=1.0, noise_multiplier=0.8, batch_size=500,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    ```

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
    """

    def __init__(
        self,
        optimizer,
        *,
        carriers: str = "history",
        warmup_steps: int = 100,
        power_iterations: int = 1,
        start: str = "warm",
        **kwargs,
    ):
        super().__init__(optimizer, **kwargs)
        if carriers not in _CARRIERS:
            raise ValueError(
                f"Expected carriers in {_CARRIERS}, got {carriers!r}."
            )
        if start not in _STARTS:
            raise ValueError(f"Expected start in {_STARTS}, got {start!r}.")
        if not (is_int(warmup_steps) and warmup_steps >= 0):
            raise ValueError(
                f"Expected warmup_steps >= 0 (int), got {warmup_steps!r}."
            )
        check_count("power_iterations", power_iterations)
        self._carriers = carriers
        self._warmup_steps = int(warmup_steps)
        self._power_iterations = int(power_iterations)
        self._start = start
        self._found = None

    carriers = property(lambda self: self._carriers)
    warmup_steps = property(lambda self: self._warmup_steps)
    power_iterations = property(lambda self: self._power_iterations)
    start = property(lambda self: self._start)

    @property
    def description(self):
        source = {
            "history": f"the history of weights after {self.warmup_steps} "
            "steps, of the weights before",
            "weight": "weights",
            "random": "random carriers",
        }[self.carriers]
        return f"RGP, from {source}"

    # State.

    def build_for(self, model):
        found = {
            id(layer.carriers.kernel): layer.carriers
            for layer in reparametrized_layers(model.model)
        }
        found = [found.get(id(v)) for v in model.trainable_variables]
        if not any(found):
            raise ValueError(
                f"Expected a model with gradient carriers, got "
                f"'{model.model.name}', none of whose trainable layers has "
                "them. Call `tf_dpsub.layers.reparametrize(model, rank=...)` "
                "before `make_private`."
            )
        if self._found is None:
            self._found = found
        super().build_for(model)

    def build(self, variables):
        if self.built:
            return
        if self._found is None:
            raise RuntimeError(
                "RGP was built without a model, whose layers hold the gradient "
                "carriers. Compile a private model with it."
            )
        super().build(variables)
        self._seed_variable = seed_variable(self, self.seed)
        self._initial = [None] * len(self._found)
        for k, carriers in enumerate(self._found):
            if carriers is None or self.carriers == "random":
                continue
            # The next power iteration starts from it: it belongs to the state.
            self._track_variable(carriers.right)
            if self.carriers == "history":
                self._initial[k] = self.add_variable(
                    carriers.kernel.shape,
                    dtype=carriers.kernel.dtype,
                    aggregation="only_first_replica",
                    name="initial",
                )

    @property
    def per_example_variables(self):
        return [
            part
            for v, carriers in zip(self._trainable_variables, self._found)
            for part in (
                [v] if carriers is None else [carriers.left, carriers.right]
            )
        ]

    def prepare(self):
        # Not when it is built: weights may be loaded after that.
        kept = [v for v in self._initial if v is not None]
        assign_if(
            tf.equal(self.iterations, 0),
            kept,
            lambda: [
                tf.identity(carriers.kernel)
                for carriers, v in zip(self._found, self._initial)
                if v is not None
            ],
        )
        key = tf.convert_to_tensor(self._seed_variable.value)
        key = tf.stack([key, tf.cast(self.iterations, tf.int64)])
        for k, carriers in enumerate(self._found):
            if carriers is not None:
                own = tf.random.experimental.stateless_fold_in(key, k)
                carriers.assign(*self._factors(carriers, self._initial[k], own))

    def _factors(self, carriers, initial, key):
        """Orthonormal L and R for the next step."""
        p, d, r = carriers.inputs, carriers.outputs, carriers.rank
        keys = tf.random.experimental.stateless_split(key)
        first = tf.random.stateless_normal([p, r], keys[0])
        second = tf.random.stateless_normal([d, r], keys[1])
        if self.carriers == "random":
            left, right = (tf.linalg.qr(draw).q for draw in (first, second))
            return left, tf.transpose(right)
        followed = self._followed(carriers, initial)
        right = second
        if self.start == "warm":
            last = tf.transpose(tf.reshape(carriers.right, [r, d]))
            right = tf.where(tf.reduce_any(last != 0), last, second)
        for _ in range(self.power_iterations):
            left = _orthonormal(followed @ right, first)
            right = _orthonormal(
                tf.matmul(followed, left, transpose_a=True), second
            )
        return left, tf.transpose(right)

    def _followed(self, carriers, initial):
        """The matrix whose largest directions carriers take."""
        weights = tf.cast(carriers.kernel, tf.float32)
        if initial is not None:
            is_warm = tf.cast(self.iterations >= self.warmup_steps, tf.float32)
            weights -= is_warm * tf.cast(initial, tf.float32)
        return carriers.matrix(weights)

    # The mechanism.

    def privatize(self, noisy_sums):
        means = iter(super().privatize(noisy_sums))
        return [
            next(means) if c is None else _lifted(c, next(means), next(means))
            for c in self._found
        ]

    # What Keras expects of an optimizer.

    def load_own_variables(self, store):
        found = [store[str(i)].shape for i in range(len(store.keys()))]
        wanted = [tuple(v.shape) for v in self._variables]
        if len(found) == len(self.variables):
            # A file of an earlier version, with the inner optimizer's.
            wanted = [tuple(v.shape) for v in self.variables]
        if found != wanted:
            raise ValueError(
                "Expected the saved state of an RGP optimizer for the same "
                "layers and ranks, got variables of other shapes: "
                f"{_differences(found, wanted)}. Reparametrize the model with "
                "the ranks that it was saved with."
            )
        super().load_own_variables(store)

    def get_config(self):
        return {
            **super().get_config(),
            "carriers": self.carriers,
            "warmup_steps": self.warmup_steps,
            "power_iterations": self.power_iterations,
            "start": self.start,
        }


def _orthonormal(directions, fill):
    """Orthonormal columns, those of `fill` where there is no direction."""
    directions = linear_algebra.normalized(directions)
    norms = tf.norm(directions, axis=0)
    directions /= tf.where(norms > 0, norms, 1.0)
    return tf.linalg.qr(directions + _FILL * fill).q


def _lifted(carriers, left_gradient, right_gradient):
    """The gradient of a kernel, from those of its carriers."""
    left = tf.reshape(carriers.left, [carriers.inputs, -1])
    right = tf.reshape(carriers.right, [-1, carriers.outputs])
    by_left = tf.reshape(left_gradient, left.shape)
    by_right = tf.reshape(right_gradient, right.shape)
    # What both see counts once.
    common = tf.matmul(left, by_left, transpose_a=True)
    return carriers.like_kernel(
        by_left @ right + left @ (by_right - common @ right)
    )


def _differences(found, wanted):
    pairs = [
        f"{a} instead of {b}" for a, b in zip(found, wanted) if a != b
    ] or [f"{len(found)} instead of {len(wanted)} variables"]
    return ", ".join(pairs[:3])
