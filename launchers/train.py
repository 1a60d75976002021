"""Trains a private classifier by one command.

    tf-dpsub train --config=configs/digits_dpsgd.py \\
        --config.epsilon=1 --workdir=out/digits

A flag for the noise multiplier alone replaces the config's ε: the run then has
no budget. With flags for both, ε is a budget.

The fields of a config are those of `configs/default.py`. `--dry_run`
prints σ, ε, the number of steps, their time and memory, and trains nothing.

The workdir receives `result.json`, `metrics.csv`, `privacy_statement.txt`,
`report.html`, `progress.png`, `model.keras` (a plain Keras model),
`tensorboard/` (with the extra of this name), the ledger, and a checkpoint, from
which `--resume` goes on.
"""

from absl import flags

from tf_dpsub.launchers.terminal import program
from tf_dpsub.launchers.terminal.program import DRY_RUN, WORKDIR
from tf_dpsub.launchers.training import config_flag

_RESUME = flags.DEFINE_bool(
    "resume", False, "Go on with the run in the workdir, if there is one."
)


def main():
    """Trains as the flags say."""
    config = config_flag.begin()
    from tf_dpsub.launchers.training import training_run

    if DRY_RUN.value:
        training_run.announce(config, WORKDIR.value, _RESUME.value)
    else:
        training_run.train(
            config,
            WORKDIR.value,
            _RESUME.value,
            command=program.command("train"),
        )


def run():
    """Runs `tf-dpsub train`."""
    config_flag.run(main)


if __name__ == "__main__":
    run()
