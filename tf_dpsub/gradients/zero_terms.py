"""Terms of value zero: seen by gradients alone, and never computed.

A layer with gradient carriers returns `outputs + (term - term)`, in which the
second `term` is taken as a constant. Where per-example gradients are found in
the graph, it need not be added: the gradient at the outputs is that at the
term.
"""

import contextlib
import dataclasses
import threading

import tensorflow as tf

_STACK = threading.local()


@dataclasses.dataclass(frozen=True, eq=False)
class ZeroTerm:
    """A term that was left out of a sum.

    Attributes:
        total: tensor, the sum without it.
        term: tensor of that shape.
    """

    total: tf.Tensor
    term: tf.Tensor


@contextlib.contextmanager
def left_out():
    """A context in which `added` leaves terms out.

    Those within functions and loops are added: their tensors are of another
    graph.

    Yields:
        List of `ZeroTerm`, to which those that are left out are added.
    """
    terms: list[ZeroTerm] = []
    outer = getattr(_STACK, "current", None)
    _STACK.current = (tf.compat.v1.get_default_graph(), terms)
    try:
        yield terms
    finally:
        _STACK.current = outer


def added(outputs, term):
    """`outputs`, from which gradients also reach what `term` is computed from.

    Args:
        outputs: tensor.
        term: tensor of that shape.

    Returns:
        Tensor with the value of `outputs`.
    """
    current = getattr(_STACK, "current", None)
    if current is not None:
        graph, terms = current
        if graph is getattr(outputs, "graph", None):
            total = tf.identity(outputs)
            terms.append(ZeroTerm(total, term))
            return total
    return outputs + (term - tf.stop_gradient(term))


def gradients(y, xs: list, terms: list) -> list:
    """`tf.gradients(y, xs)`, as if terms that were left out had been added.

    No term may be computed from another: a layer's ends at its inputs.

    Args:
        y: scalar tensor.
        xs: list of tensors or variables.
        terms: list of `ZeroTerm`.

    Returns:
        List of tensors; None where `y` does not depend on one.
    """
    at = tf.gradients(y, [*xs, *(t.total for t in terms)])
    at, at_totals = at[: len(xs)], at[len(xs) :]
    used = [(t.term, g) for t, g in zip(terms, at_totals) if g is not None]
    if not used:
        return at
    through = tf.gradients([t for t, _ in used], xs, [g for _, g in used])
    return [
        one if other is None else other if one is None else one + other
        for one, other in zip(at, through)
    ]
