"""Random numbers: each example's own, or shared by all examples.

One example less moves all that were drawn after it to other places of the
batch. Where each place has random numbers of its own, which are independent, of
one law, secret and new at each step, it makes no difference which place an
example has; neither does it where one draw serves all examples of a step.
Numbers that some examples share and others do not, as those of a microbatch,
would tell who stood where.
"""

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients.graph import sources
from tf_dpsub.gradients.graph.states import PUBLIC, Draw, Key, Unproven

# Entry by entry independent, and of one law where their parameters are one.
_STATELESS = (
    "StatelessRandomBinomial",
    "StatelessRandomGamma",
    "StatelessRandomNormal",
    "StatelessRandomPoisson",
    "StatelessRandomUniform",
    "StatelessTruncatedNormal",
)
_STATEFUL = frozenset(
    (
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    )
)

# Inputs of a draw that determine its numbers; the others are their parameters.
SEEDS = frozenset({"alg", "counter", "key", "seed"})
# What keeps all of a key, and makes of two keys no equal ones.
_KEEP_SECRETS = frozenset(
    """
    ExpandDims Identity Reshape Squeeze StatelessRandomGetAlg
    StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg
    """.split()
)
# Keras multiplies keys by one, and takes them modulo this number.
_MODULUS = 2**31 - 2
# Sums of what is added up to this one differ modulo that number, and modulo
# powers of two from 2^32 on.
MOST_ADDED = 2**20


def is_draw(op) -> bool:
    """Returns whether an operation draws entries that are independent."""
    return op.type.startswith(_STATELESS) or op.type in _STATEFUL


def names(op) -> list:
    """Names of the inputs of an operation."""
    return [argument.name for argument in op.op_def.input_arg]


def made(op, constants):
    """Returns what an operation makes of a key, None if the result is no key.

    `SeedGenerator.next` adds to one number of a key alone. A constant that is
    added to both, as `keras.random.beta` does, makes another that is none of
    those to come; one that is added to the other number may make the next one.
    What is taken of a key, or multiplied, may be known. Two keys of a seed stay
    apart if both are converted in the same ways, one after another: two numbers
    that differ by 4 may be one modulo 2^32 and then 2^31 - 2.

    Args:
        op: `tf.Operation`, of a key and public tensors.
        constants: `ConstantFolder`.

    Returns:
        Pair of what it adds, an int, and of a tuple that names how it converts
        the numbers, empty if it does not.
    """
    if op.type in _KEEP_SECRETS:
        return 0, ()
    before, after = op.inputs[0].dtype, op.outputs[0].dtype
    if not (after.is_integer and after.size >= 4):
        return None
    if op.type == "Cast" or op.type == "Bitcast" and before.size == after.size:
        return 0, ((op.type, before.name, after.name),)
    if op.type not in ("AddV2", "FloorMod", "Mul"):
        return None
    try:
        constant = np.unique(constants(op.inputs[1]))
    except Unproven:
        return None
    if len(constant) != 1 or op.inputs[0].shape != op.outputs[0].shape:
        # One number that is repeated is no key.
        return None
    if op.type == "AddV2":
        return int(constant[0]), ()
    if op.type == "Mul":
        return (0, ()) if constant[0] == 1 else None
    return (0, (op.type,)) if constant[0] == _MODULUS else None


def splits(op) -> bool:
    """Returns whether an operation makes a key, and a counter beside it."""
    return op.type.startswith("StatelessRandomGetKeyCounter")


def parts(op, seeds, is_whole) -> list:
    """States of what an operation makes that splits a seed.

    The counter begins with zero, and the number of an algorithm is that of the
    device: who took them for keys would draw what anybody can.

    Args:
        op: `tf.Operation`.
        seeds: frozenset, as `Key.seeds`.
        is_whole: bool, whether its input is as secret as the keys are.
    """
    states = {"key": Key(seeds, is_whole), "counter": Key(seeds, False)}
    return [states.get(output.name, PUBLIC) for output in op.op_def.output_arg]


def is_own_stream(op) -> bool:
    """Returns whether a draw begins where the key of its seed begins.

    With a counter of its own, numbers of one place of a draw could be those of
    another place of another draw.
    """
    inputs = dict(zip(names(op), op.inputs))
    if "counter" not in inputs:
        return True
    key, counter = inputs["key"], inputs["counter"]
    return (
        key.op is counter.op
        and key.op.type == "StatelessRandomGetKeyCounter"
        and (key.value_index, counter.value_index) == (0, 1)
    )


def draw(op, seeds=frozenset()):
    """The `Draw` that an operation makes."""
    shape = op.outputs[0].shape
    size = tuple(shape.as_list()) if shape.rank is not None else None
    if not seeds:
        return Draw(frozenset(), (op.type, op.name, size))
    return Draw(seeds, (op.type, op.outputs[0].dtype.name, size))


class Draws:
    """Record of how a loss uses its random numbers, kept by the proof."""

    def __init__(self):
        self._shared: set = set()
        self._divisions: dict = {}
        self._shares_unseeded = False

    def share(self, seeds, unseeded=False):
        """Records that all examples of a microbatch share one draw.

        Args:
            seeds: iterable of pairs, as `Key.seeds`.
            unseeded: bool, whether no seed determines it.
        """
        self._shared.update(seed for seed, _ in seeds)
        self._shares_unseeded |= unseeded

    def share_drawn(self, drawn):
        """Records that all examples of a microbatch share random numbers."""
        for one in drawn.draws:
            self.share(one.seeds, not one.seeds)

    def divide(self, drawn, state, shape):
        """Records that each example uses a slice of its own.

        Args:
            drawn: `Drawn`.
            state: `PerExample`, where its slices are.
            shape: list of int, that of the tensor.
        """
        before = int(tf.TensorShape(shape[: state.axis]).num_elements())
        after = int(tf.TensorShape(shape[state.axis + 1 :]).num_elements())
        division = (
            drawn.layout,
            before * state.outer,
            state.inner * after,
        )
        for one in drawn.draws:
            for pair in one.seeds or [(None, one.kind)]:
                self._divisions.setdefault(pair, set()).add(
                    (one.kind, division)
                )

    def uses(self) -> dict:
        """Use of the draws of each seed: an example's own, or shared by all.

        Returns:
            dict from seeds to `sources.EACH` or `sources.ALL`.

        Raises:
            Unproven: if some are shared and others are not, or if slices of
                several examples have numbers in common.
        """
        if self._shares_unseeded:
            raise Unproven(
                "random numbers that no SeedGenerator determines are shared by "
                "some examples, not by all"
            )
        for divisions in self._divisions.values():
            if len(divisions) > 1:
                raise Unproven(
                    "random numbers of one draw are used in two ways, so that "
                    "examples may have some in common"
                )
        ways: dict = {}
        for seed, which in self._divisions:
            if seed is not None:
                ways.setdefault(seed, set()).add(which[2])
        if any(len(several) > 1 for several in ways.values()):
            raise Unproven(
                "keys of one SeedGenerator are converted to other integers in "
                "one draw than in another, so that both may be the same"
            )
        divided = set(ways)
        if divided & self._shared:
            raise Unproven(
                "one SeedGenerator draws for each example and for all of them: "
                "two generators would be proved"
            )
        return {
            **{seed: sources.EACH for seed in divided},
            **{seed: sources.ALL for seed in self._shared},
        }
