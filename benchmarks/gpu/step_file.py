"""Compiled steps in files, for machines without TensorFlow.

This module needs NumPy alone. A file holds a training step in StableHLO, its
arguments, and its results on the machine that wrote the file.
"""

import dataclasses
import json

import numpy as np

# Larger arrays of floats are not stored, but drawn where a file is read.
_STORED = 2**16
_SAMPLED = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a step.

    Attributes:
        name: string, of the variable; empty for data.
        shape: tuple of ints.
        dtype: string.
        value: array; None if one is drawn.
        mean, stddev: floats, of numbers that are drawn.
        is_trained: bool, whether it is a weight that the step trains.
    """

    name: str
    shape: tuple
    dtype: str
    value: np.ndarray | None = None
    mean: float = 0.0
    stddev: float = 0.0
    is_trained: bool = False

    @classmethod
    def of(cls, array, name="", is_trained=False):
        """Makes an argument with the value of an array."""
        return cls(
            name=name,
            shape=array.shape,
            dtype=array.dtype.name,
            value=array,
            is_trained=is_trained,
        )

    @classmethod
    def like(cls, array, name="", is_trained=False):
        """Makes an argument like an array; a large one has random numbers."""
        if array.size <= _STORED or array.dtype.kind != "f":
            return cls.of(array, name, is_trained)
        return cls(
            name=name,
            shape=array.shape,
            dtype=array.dtype.name,
            mean=float(array.mean()),
            stddev=float(array.std()),
            is_trained=is_trained,
        )

    def array(self, seed):
        """The value; for a large one, numbers that the seed determines."""
        if self.value is not None:
            return self.value
        numbers = np.random.default_rng(seed).standard_normal(
            self.shape, np.float32
        )
        return (self.mean + self.stddev * numbers).astype(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A training step, from its arguments to its results.

    Attributes:
        workload: string.
        method: string.
        stablehlo: string, the program.
        arguments: list of `Argument`.
        updates: dict of ints, from the index of a result to that of the
            argument whose next value it is.
        expected: list of arrays, a sample of each result.
        cycle: int, steps after which it has done all that it does.
    """

    workload: str
    method: str
    stablehlo: str
    arguments: list
    updates: dict
    expected: list
    cycle: int = 1

    def arrays(self):
        """Values of all arguments."""
        return [a.array(seed) for seed, a in enumerate(self.arguments)]

    def errors(self, results):
        """Errors of the results of a first step.

        Args:
            results: list of arrays.

        Returns:
            Two floats: of what the step reports, its loss, and of the change of
            the trained weights, each relative to what is expected.
        """
        samples = [sample(r) for r in results]
        reported = len(samples) - len(self.updates)
        loss = _relative_error(samples[:reported], self.expected[:reported])
        changes, expected = [], []
        for k, argument in self.updates.items():
            if self.arguments[argument].is_trained:
                before = sample(self.arguments[argument].array(argument))
                changes.append(np.subtract(samples[k], before, dtype=float))
                expected.append(
                    np.subtract(self.expected[k], before, dtype=float)
                )
        return loss, _relative_error(changes, expected)

    def write(self, file):
        """Writes the step to an `.npz` file."""
        described = dataclasses.asdict(self) | {
            "arguments": [
                dataclasses.asdict(a) | {"value": None} for a in self.arguments
            ],
            "expected": len(self.expected),
        }
        values = {
            f"argument{k}": a.value
            for k, a in enumerate(self.arguments)
            if a.value is not None
        }
        expected = {f"expected{k}": e for k, e in enumerate(self.expected)}
        np.savez_compressed(
            file, step=np.array(json.dumps(described)), **values, **expected
        )

    @classmethod
    def read(cls, file):
        """Reads a file of `write`."""
        with np.load(file) as arrays:
            fields = json.loads(str(arrays["step"]))
            return cls(**fields | {
                "arguments": [
                    Argument(**a | {
                        "shape": tuple(a["shape"]),
                        "value": arrays.get(f"argument{k}"),
                    })
                    for k, a in enumerate(fields["arguments"])
                ],
                "updates": {
                    int(k): v for k, v in fields["updates"].items()
                },
                "expected": [
                    arrays[f"expected{k}"] for k in range(fields["expected"])
                ],
            })  # fmt: skip


def sample(array):
    """A sample of the numbers of an array, one-dimensional."""
    flat = np.asarray(array).reshape(-1)
    return flat[:: -(-flat.size // _SAMPLED)]


def _relative_error(computed, expected):
    """Norm of the difference of lists of arrays, as a share of `expected`."""
    computed, expected = np.concatenate(computed), np.concatenate(expected)
    difference = np.linalg.norm(computed - expected)
    return float(difference / np.linalg.norm(expected))
