"""Disjoint parts of the private examples, one for each teacher."""

import numpy as np

from tf_dpsub.checks import check_count, check_seed


def disjoint_parts(examples: int, teachers: int, seed: int = 0) -> list:
    """Indices of the private examples that each teacher is trained on.

    Formal guarantees: nothing is released. Each example is in exactly one part.
    Which one follows from its place and public numbers alone, never from the
    content of any example: replacing an example by an empty one changes the
    training data of one teacher, and nothing for the others.

    Args:
        examples: int, number of private examples.
        teachers: int, number of parts. Their sizes differ by at most one.
        seed: int, public, of the permutation that is cut into parts. Defaults
            to `0`.

    Returns:
        List of `teachers` int arrays, sorted indices into the examples.

    Raises:
        ValueError: if an argument is out of range, or there are fewer examples
            than teachers.

    Example:

    ```python
    parts = tf_dpsub.pate.disjoint_parts(60_000, teachers=250)
    x_of_first_teacher = x_train[parts[0]]  # 240 examples
    ```
    """
    check_count("examples", examples)
    check_count("teachers", teachers)
    check_seed(seed)
    if examples < teachers:
        raise ValueError(
            f"Expected an example for each teacher, got {examples} examples "
            f"and {teachers} teachers. Take fewer teachers."
        )
    order = np.random.default_rng(seed).permutation(examples)
    return [np.sort(part) for part in np.array_split(order, teachers)]
