"""A run on scikit-learn's digits, and what stops it."""

from tf_dpsub.configs import default
from tf_dpsub.launchers.training import run_recorder

SETTINGS = {
    "model_kwargs": {"hidden": (32,), "activation": "tanh"},
    "inner_optimizer_kwargs": {"momentum": 0.9},
    "epsilon": 3.0,
    "batch_size": 256,
    "epochs": 2,
}


def digits_config(**changes):
    config = default.get_config()
    for name, value in (SETTINGS | changes).items():
        config[name] = value
    return config


class StopAt:
    """Calls a function before some step of some epoch, in `RunRecorder`."""

    def __init__(self, monkeypatch, epoch, step, stop):
        def on_train_batch_begin(recorder, batch, logs=None):
            if (len(recorder.rows), batch) == (epoch - 1, step - 1):
                stop()
            original(recorder, batch, logs)

        original = run_recorder.RunRecorder.on_train_batch_begin
        monkeypatch.setattr(
            run_recorder.RunRecorder,
            "on_train_batch_begin",
            on_train_batch_begin,
        )
