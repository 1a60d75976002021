"""State of mechanisms that tells nothing about private data."""

import secrets
import weakref
from typing import Any

import tensorflow as tf

_VARIABLES: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class PublicState:
    """State of a mechanism that follows public data or released weights.

    It is refreshed before each step, apart from private data. This base has no
    state at all.

    Attributes:
        allow_private: bool, whether public examples may be private ones as
            well.
    """

    allow_private = False

    @property
    def is_public(self) -> bool:
        """Whether the state tells nothing about private data."""
        return True

    @property
    def is_compilable(self) -> bool:
        """Whether XLA may compile a step that uses the state."""
        return True

    @property
    def public_inputs(self) -> Any:
        """Public examples, whose inputs must not be private; None if none."""
        return None

    @property
    def notes(self) -> tuple:
        """Assumptions for the statement: what is taken as public, strings."""
        return ()

    def build(self, optimizer):
        """Creates the state that is saved with an optimizer: none by default.

        Args:
            optimizer: Keras optimizer, to `add_variable` to.
        """

    def attach(self, model):
        """Creates the state that is not saved, once a model's step is built.

        Args:
            model: compiled `tf_dpsub.PrivateModel`, whose step is built.
        """

    def begin_run(self, steps: int | None):
        """Called once before the first step of a run.

        Args:
            steps: int, the steps of the run; None where that is not known.
        """

    def prepare(self, iterations, is_used=True):
        """Refreshes the state before a step, if it is due.

        Args:
            iterations: int tensor, the number of steps so far.
            is_used: bool tensor, whether the step uses the state at all.
                Defaults to `True`.

        Returns:
            List of tensors that are there once the state is fresh, if both at
            once would take too much memory; or None.
        """


def seed_variable(optimizer, seed: int | None):
    """A seed that is saved with an optimizer, and the same for all workers.

    Args:
        optimizer: Keras optimizer.
        seed: int, or None for fresh entropy.

    Returns:
        Keras variable, an int64 scalar.
    """
    # Variables of several workers start from the value of the first one.
    value = secrets.randbits(62) if seed is None else int(seed)
    return optimizer.add_variable(
        (),
        initializer=lambda shape, dtype: tf.constant(value, tf.int64),
        dtype="int64",
        name="subspace_seed",
    )


def public_variable(shape, dtype=tf.float32):
    """A variable of public state, which is not saved: it is made again."""
    variable = tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    _VARIABLES[id(variable)] = variable
    return variable


def public_variables() -> list:
    """All variables of public states in this process: no metric writes one."""
    return list(_VARIABLES.values())


def assign_if(due, variables, compute):
    """Assigns the values that `compute` returns, where a refresh is due."""
    always = tf.get_static_value(due)
    if always or tf.distribute.has_strategy():
        # A mirrored variable cannot be assigned inside of a condition.
        values = (
            compute()
            if always
            else tf.cond(
                due, compute, lambda: [tf.identity(v) for v in variables]
            )
        )
        for variable, value in zip(variables, values):
            variable.assign(value)
        return

    def assign():
        for variable, value in zip(variables, compute()):
            variable.assign(value)

    tf.cond(due, assign, lambda: None)
