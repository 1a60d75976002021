"""Orthonormal gradient carriers that follow the weights of a model."""

import tensorflow as tf

from tf_dpsub.checks import check_choice, check_count, check_nonnegative
from tf_dpsub.gradients import precision
from tf_dpsub.layers import reparametrized_layers
from tf_dpsub.primitives.public_state import (
    PublicState,
    assign_if,
    seed_variable,
)
from tf_dpsub.subspaces import linear_algebra

_CARRIERS = ("history", "weight", "random", "public")
_STARTS = ("warm", "gaussian")
# Share of random directions in each column of a product: they take the place
# of what has no direction.
_FILL = 2.0**-20


class CarrierBases(PublicState):
    """Orthonormal L and R of each kernel with carriers, new at each step.

    They are computed from released weights and public randomness.

    Args:
        carriers: string, what they follow: `"history"`, `"weight"`, `"random"`
            or, in `PublicCarrierBases`, `"public"`.
        warmup_steps: int, for `"history"`, the number of steps for which they
            follow the weights.
        power_iterations: int, number of power iterations at a step.
        start: string, where these start: from the last R (`"warm"`), or from a
            random one (`"gaussian"`).

    Attributes:
        of_variables: list of `tf_dpsub.layers.Carriers`, or None, for each
            trainable variable of the model; empty before `find`.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        *,
        carriers: str,
        warmup_steps: int,
        power_iterations: int,
        start: str,
    ):
        check_choice("carriers", carriers, _CARRIERS)
        check_choice("start", start, _STARTS)
        check_nonnegative("warmup_steps", warmup_steps)
        check_count("power_iterations", power_iterations)
        self.carriers = carriers
        self.warmup_steps = int(warmup_steps)
        self.power_iterations = int(power_iterations)
        self.start = start
        self.of_variables: list = []

    @property
    def source(self):
        """What carriers come from, in words."""
        return {
            "history": f"the history of weights after {self.warmup_steps} "
            "steps, of the weights before",
            "weight": "weights",
            "public": "gradients of public examples",
            "random": "random carriers",
        }[self.carriers]

    def find(self, model):
        """Finds the carriers of a model's kernels.

        Args:
            model: `tf_dpsub.PrivateModel`.

        Raises:
            ValueError: if no trainable layer has any.
        """
        by_kernel = {
            id(layer.carriers.kernel): layer.carriers
            for layer in reparametrized_layers(model.model)
        }
        of_variables = [by_kernel.get(id(v)) for v in model.trainable_variables]
        if not any(of_variables):
            raise ValueError(
                f"Expected a model with gradient carriers, got "
                f"'{model.model.name}', none of whose trainable layers has "
                "them. Call `tf_dpsub.layers.reparametrize(model, rank=...)` "
                "before `make_private`."
            )
        if not self.of_variables:
            self.of_variables = of_variables

    def build(self, optimizer):
        if not self.of_variables:
            raise RuntimeError(
                "RGP was built without a model, whose layers hold the gradient "
                "carriers. Compile a private model with it."
            )
        self._seed_variable = seed_variable(optimizer, optimizer.seed)
        self._initial = [None] * len(self.of_variables)
        for k, carriers in enumerate(self.of_variables):
            if carriers is None or self.carriers == "random":
                continue
            # The next power iteration starts from it: it belongs to the state.
            optimizer._track_variable(carriers.right)
            if self.carriers == "history":
                self._initial[k] = optimizer.add_variable(
                    carriers.kernel.shape,
                    dtype=carriers.kernel.dtype,
                    aggregation="only_first_replica",
                    name="initial",
                )

    def prepare(self, iterations, is_used=True):
        # Not when it is built: weights may be loaded after that.
        kept = [v for v in self._initial if v is not None]
        assign_if(
            tf.equal(iterations, 0),
            kept,
            lambda: [
                tf.identity(carriers.kernel)
                for carriers, v in zip(self.of_variables, self._initial)
                if v is not None
            ],
        )
        key = self._key(iterations)
        for k, carriers in enumerate(self.of_variables):
            if carriers is not None:
                factors = self._factors(
                    carriers,
                    self._initial[k],
                    iterations,
                    tf.random.experimental.stateless_fold_in(key, k),
                )
                carriers.assign(*factors)

    def _factors(self, carriers, initial, iterations, key):
        """Orthonormal L and R for the next step."""
        first, second = self._draws(carriers, key)
        if self.carriers == "random":
            left, right = (tf.linalg.qr(draw).q for draw in (first, second))
            return left, tf.transpose(right)
        followed = self._followed(carriers, initial, iterations)
        _, right = self._start(carriers, (first, second))
        for _ in range(self.power_iterations):
            left = orthonormal(precision.matmul(followed, right), first)
            right = orthonormal(
                precision.matmul(followed, left, transpose_a=True), second
            )
        return left, tf.transpose(right)

    def _key(self, iterations):
        """Key of what a step draws, the same for all replicas."""
        seed = tf.convert_to_tensor(self._seed_variable.value)
        return tf.stack([seed, tf.cast(iterations, tf.int64)])

    def _draws(self, carriers, key):
        """Random `[inputs, rank]` and `[outputs, rank]`."""
        keys = tf.unstack(tf.random.experimental.stateless_split(key))
        return [
            tf.random.stateless_normal([size, carriers.rank], side_key)
            for size, side_key in zip((carriers.inputs, carriers.outputs), keys)
        ]

    def _start(self, carriers, draws):
        """L and R^T that power iterations start from."""
        if self.start == "gaussian":
            return list(draws)
        r = carriers.rank
        last = (
            tf.reshape(carriers.left, [-1, r]),
            tf.transpose(tf.reshape(carriers.right, [r, -1])),
        )
        return [
            tf.where(tf.reduce_any(a != 0), tf.cast(a, tf.float32), draw)
            for a, draw in zip(last, draws)
        ]

    def _followed(self, carriers, initial, iterations):
        """The matrix whose largest directions carriers take."""
        weights = tf.cast(carriers.kernel, tf.float32)
        if initial is not None:
            is_warm = tf.cast(iterations >= self.warmup_steps, tf.float32)
            weights -= is_warm * tf.cast(initial, tf.float32)
        return carriers.matrix(weights)

    def replaced(self, variables: list) -> list:
        """Variables with carriers in place of their kernels.

        Args:
            variables: list of variables, those of the model.
        """
        return [
            part
            for v, carriers in zip(variables, self.of_variables)
            for part in (
                [v] if carriers is None else [carriers.left, carriers.right]
            )
        ]

    def lift(self, gradients: list) -> list:
        """Gradients of a model's variables, from those of `replaced` ones.

        Args:
            gradients: list of float32 tensors.
        """
        parts = iter(gradients)
        return [
            next(parts) if c is None else _lifted(c, next(parts), next(parts))
            for c in self.of_variables
        ]

    def get_config(self):
        return {
            "carriers": self.carriers,
            "warmup_steps": self.warmup_steps,
            "power_iterations": self.power_iterations,
            "start": self.start,
        }


def check_saved_shapes(shapes: list, expected: list):
    """Checks that saved variables are those of a model with equal carriers.

    Args:
        shapes: list of shapes, as saved.
        expected: list of shapes.

    Raises:
        ValueError: if they differ.
    """
    if shapes == expected:
        return
    differences = [
        f"{a} instead of {b}" for a, b in zip(shapes, expected) if a != b
    ] or [f"{len(shapes)} instead of {len(expected)} variables"]
    raise ValueError(
        "Expected the saved state of an RGP optimizer for the same layers and "
        "ranks, got variables of other shapes: "
        f"{', '.join(differences[:3])}. Reparametrize the model with the ranks "
        "that it was saved with."
    )


def orthonormal(directions, fill):
    """Orthonormal columns, those of `fill` where there is no direction.

    In float32, reflections of tens of thousands of rows, those of a vocabulary,
    would leave more than a basis may be off.
    """
    directions = linear_algebra.normalized(directions)
    norms = tf.norm(directions, axis=0)
    directions /= tf.where(norms > 0, norms, 1.0)
    directions = tf.cast(directions + _FILL * fill, tf.float64)
    return tf.cast(tf.linalg.qr(directions).q, tf.float32)


def _lifted(carriers, left_gradient, right_gradient):
    """The gradient of a kernel, from those of its carriers."""
    left = tf.reshape(carriers.left, [carriers.inputs, -1])
    right = tf.reshape(carriers.right, [-1, carriers.outputs])
    by_left = tf.reshape(left_gradient, left.shape)
    by_right = tf.reshape(right_gradient, right.shape)
    # What both see counts once.
    common = precision.matmul(left, by_left, transpose_a=True)
    rest = by_right - precision.matmul(common, right)
    return carriers.like_kernel(
        precision.matmul(by_left, right) + precision.matmul(left, rest)
    )
