"""Random numbers: whose they are, as the argument about places needs it.

One example less moves all that were drawn after it to other places of the
batch. Where each place has random numbers of its own, which are independent, of
one law, secret and new at each step, it makes no difference which place an
example has; neither does it where one draw serves all examples of a step.
Numbers that some examples share and others do not, as those of a microbatch,
would tell who stood where.
"""

import tensorflow as tf

from tf_dpsub.gradients.graph import sources
from tf_dpsub.gradients.graph.states import Draw, Unproven

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


def is_draw(op) -> bool:
    """Whether the numbers of an operation are entry by entry independent."""
    return op.type.startswith(_STATELESS) or op.type in _STATEFUL


def draw(op, seeds=frozenset()):
    """The `Draw` that an operation makes."""
    shape = op.outputs[0].shape
    size = tuple(shape.as_list()) if shape.rank is not None else None
    if not seeds:
        return Draw(frozenset(), (op.type, op.name, size))
    return Draw(seeds, (op.type, op.outputs[0].dtype.name, size))


class Draws:
    """How the random numbers of a loss are used, as the proof finds it."""

    def __init__(self):
        self._shared: set = set()
        self._own: dict = {}
        self._shares_unseeded = False

    def share(self, seeds, unseeded=False):
        """One draw is used by all examples of a microbatch.

        Args:
            seeds: iterable of pairs, as `Key.seeds`.
            unseeded: bool, whether no seed determines it.
        """
        self._shared.update(seed for seed, _ in seeds)
        self._shares_unseeded |= unseeded

    def share_drawn(self, drawn):
        """The same, of a `Drawn`."""
        for one in drawn.draws:
            self.share(one.seeds, not one.seeds)

    def divide(self, drawn, state, shape):
        """Each example uses a slice of its own.

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
                self._own.setdefault(pair, set()).add((one.kind, division))

    def uses(self) -> dict:
        """Whether examples share the draws of a seed, or each has its own.

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
        for divisions in self._own.values():
            if len(divisions) > 1:
                raise Unproven(
                    "random numbers of one draw are used in two ways, so that "
                    "examples may have some in common"
                )
        own = {seed for seed, _ in self._own if seed is not None}
        if own & self._shared:
            raise Unproven(
                "one SeedGenerator draws for each example and for all of them: "
                "two generators would be proved"
            )
        return {
            **{seed: sources.EACH for seed in own},
            **{seed: sources.ALL for seed in self._shared},
        }
