"""Trains a private classifier by one command.

    python launchers/train.py --config=configs/digits_dpsgd.py \\
        --config.noise_multiplier=1.1 --workdir=out/digits

The command `tf-dpsub-train` is the same. The fields of a config are those of
`launchers/train_config.py`. The workdir receives `result.json`, `metrics.csv`,
`privacy_statement.txt`, `progress.png`, `model.keras` (a plain Keras model),
`tensorboard/`, the ledger, and a checkpoint, from which `--resume` goes on.
"""

from absl import app, flags, logging

from launchers import config_flag
from launchers.workdir_flag import WORKDIR

_RESUME = flags.DEFINE_bool(
    "resume", False, "Go on with the run in the workdir, if there is one."
)


def main(argv):
    """Trains as the flags say; returns the exit code."""
    config = config_flag.begin(argv)
    from launchers import experiment

    try:
        experiment.train(config, WORKDIR.value, _RESUME.value)
    except (ValueError, OSError, MemoryError) as error:
        # --verbosity=1 shows where it comes from.
        logging.debug("%s", error, exc_info=True)
        return f"error: {error}"
    except KeyboardInterrupt:
        return 130
    return 0


def run():
    """Runs the console command `tf-dpsub-train`."""
    app.run(main, flags_parser=config_flag.parse_flags)


if __name__ == "__main__":
    run()
