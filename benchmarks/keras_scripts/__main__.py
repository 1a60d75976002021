"""Scripts as users of Keras write them, made private and timed.

    python -m benchmarks.keras_scripts
    python -m benchmarks.keras_scripts --names=unet,mini_gpt --blocks=0

Each module beside this one is a small script after those of keras.io, up to
its call of `compile`; a line that a private run changes is marked `# changed`.
Three more change in each: the import, `make_private` and the optimizer. For
each script this prints what computes its per-example gradients, and how many
plain steps of Keras a private one takes: both alternate in one process.
"""

import dataclasses
import importlib
import pathlib
import re
import statistics

import keras
from absl import app, flags, logging

import tf_dpsub
from benchmarks import steps

_NAMES = flags.DEFINE_list("names", None, "Which scripts. Defaults to all.")
_BLOCKS = flags.DEFINE_integer(
    "blocks", 5, "Blocks of steps of each kind; 0 times nothing."
)

_FOLDER = pathlib.Path(__file__).parent
NAMES = tuple(
    sorted({p.stem for p in _FOLDER.glob("*.py")} - {"__main__", "script"})
)
# The import, `make_private`, and the private optimizer around the plain one.
_ALWAYS_CHANGED = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """Results for a script.

    Attributes:
        title: string, the category first.
        changed: int, lines that a private run changes.
        engine: string, what computes per-example gradients; "refused" where
            the script cannot be private as it is.
        ratio: float, plain steps that a private one takes; None if not timed.
        reason: string, why it is not the graph engine; "" if it is.
    """

    title: str
    changed: int
    engine: str
    ratio: float | None = None
    reason: str = ""

    def __str__(self):
        ratio = "" if self.ratio is None else f"{self.ratio:.1f}"
        changed = "" if self.engine == "refused" else self.changed
        cells = (self.title, changed, self.engine, ratio, self.reason)
        return f"| {' | '.join(map(str, cells))} |"


def described(name):
    """Title of a script, and the number of lines a private run changes."""
    title = _module(name).__doc__.strip().rstrip(".")
    text = (_FOLDER / f"{name}.py").read_text("utf-8")
    return title, _ALWAYS_CHANGED + text.count("# changed")


def _module(name):
    return importlib.import_module(f"benchmarks.keras_scripts.{name}")


def row(name, blocks):
    """Makes a script private, and times its steps.

    Args:
        name: string, one of `NAMES`.
        blocks: int, blocks of steps of each kind; 0 times nothing.

    Returns:
        `Row`.
    """
    keras.utils.set_random_seed(0)
    build = _module(name).build
    logged = _Logged()
    logging.get_absl_logger().addHandler(logged)
    try:
        private, data = _private(build())
    except (ValueError, tf_dpsub.gradients.Unproven) as error:
        return Row(*described(name), "refused", None, _first_line(error))
    finally:
        logging.get_absl_logger().removeHandler(logged)
    engine = private.training_step.implementation
    ratio = _ratio(private, data, build(), blocks) if blocks else None
    return Row(*described(name), engine, ratio, logged.reason)


def _private(script):
    """The private model of a script, and the dataset of its batches."""
    model = tf_dpsub.make_private(script.model)
    data = _data(script)
    optimizer = tf_dpsub.optimizers.DPSGD(
        keras.optimizers.Adam(1e-3),
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        batch_size=len(keras.tree.flatten(script.x)[0]),
    )
    model.compile(optimizer, script.loss)
    return model, steps.batches(model, *data)


def _data(script):
    data = [script.x, script.y, script.weights]
    while data[-1] is None:
        data.pop()
    return data


def _ratio(private, data, script, blocks):
    """Time of a private step, in plain steps."""
    plain = script.model
    plain.compile(keras.optimizers.Adam(1e-3), script.loss)
    times = steps.measure_steps(
        {
            "private": steps.step_of(private, data),
            "plain": steps.step_of(plain, steps.batches(plain, *_data(script))),
        },
        blocks,
    )
    # Ratios of neighbours in time: other load on the machine cancels.
    return statistics.median(
        a / b for a, b in zip(times["private"], times["plain"])
    )


class _Logged(logging.logging.Handler):
    """Log handler that keeps the reason against the graph engine."""

    reason = ""

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("Per-example gradients of") and "slower" in text:
            self.reason = _first_line(text[text.index("slower (") + 8 : -2])


def _first_line(text):
    line = str(text).splitlines()[0].replace("|", "\\|")
    return re.split(r"\. ", line)[0].rstrip(".")


def main(_):
    logging.set_verbosity(logging.WARNING)
    print("| script | changed lines | engine | × plain | why |")
    print("|---|---|---|---|---|")
    for name in _NAMES.value or NAMES:
        print(row(name, _BLOCKS.value), flush=True)
        keras.backend.clear_session()


if __name__ == "__main__":
    app.run(main)
