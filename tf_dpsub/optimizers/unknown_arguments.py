"""Messages about arguments that no optimizer here has."""

import difflib
import inspect

from tf_dpsub.optimizers.optimizer_wrapper import OptimizerWrapper


def message(kind: type, name: str, *_: str) -> str:
    """Says where an argument belongs, or which one was meant.

    Args:
        kind: class of the optimizer.
        name: string, the first argument that it does not have.

    Returns:
        string, for a `TypeError`.
    """
    wrong = f"{kind.__name__} has no argument {name!r}"
    # Those of other libraries.
    if name in ("learning_rate", "lr", "momentum", "weight_decay"):
        return f"{wrong}: give it to the inner optimizer."
    if name in ("num_microbatches", "gradient_accumulation_steps"):
        return f"{wrong}: leave it out, each example is clipped alone."
    if name == "bands":
        return (
            f"{wrong}: what later steps take back must lie in the coordinates "
            "and units of the step that added it, and these change. Take DPSGD."
        )
    arguments = {
        parameter
        for parent in kind.__mro__
        if issubclass(parent, OptimizerWrapper)
        for parameter in inspect.signature(parent.__init__).parameters
    } - {"self", "unknown", "kwargs"}
    close = difflib.get_close_matches(name, sorted(arguments), n=1)
    if close:
        return f"{wrong}. Did you mean {close[0]!r}?"
    return f"{wrong}. It has {', '.join(sorted(arguments))}."
