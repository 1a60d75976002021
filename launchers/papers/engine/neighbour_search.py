"""A search over a grid that ends where no neighbour is better."""

import dataclasses


class Unknown(Exception):
    """The score of a point is not known, and not to be computed now."""


def best_of(start, grid, scores, together=(), least_gain=0.0):
    """Climbs from point to point, to the best of the neighbours each time.

    One coordinate is climbed along after another, those of `together` at once,
    until no coordinate can be moved. So both neighbours of the result along
    each coordinate were scored, and gain no more than `least_gain`, except
    beyond an end of the grid.

    Args:
        start: frozen dataclass, a point of the grid.
        grid: dict from fields of the point to tuples of values, ascending.
        scores: function of a list of points that returns the score of each, a
            list of floats. It is called once for each point, with all that are
            to be compared next.
        together: tuple of fields that are climbed along at once: each of their
            neighbours is scored before the best is chosen. Defaults to `()`.
        least_gain: float, the growth of the score that is not worth a move.
            Defaults to `0.0`.

    Returns:
        A pair: the best point, and the fields whose value is at an end of
        their grid.
    """
    score_of: dict = {}

    def climbed(best, fields):
        while True:
            neighbours = _neighbours(best, fields, grid)
            new = [p for p in (best, *neighbours) if p not in score_of]
            score_of.update(zip(new, scores(new)))
            top = max(neighbours, key=score_of.__getitem__, default=best)
            if score_of[top] <= score_of[best] + least_gain:
                return best
            best = top

    steps = [(field,) for field in grid if field not in together]
    if together:
        steps.insert(0, tuple(together))
    best, before = start, None
    while best != before:
        before = best
        for fields in steps:
            best = climbed(best, fields)
    ends = [
        field
        for field, values in grid.items()
        if getattr(best, field) in (values[0], values[-1])
    ]
    return best, ends


def _neighbours(point, fields, grid):
    """The points next to one along some fields."""
    neighbours = []
    for field in fields:
        values = grid[field]
        position = values.index(getattr(point, field))
        neighbours += [
            dataclasses.replace(point, **{field: values[p]})
            for p in (position - 1, position + 1)
            if 0 <= p < len(values)
        ]
    return neighbours
