"""Time of the first `fit`, in which everything is proved and traced.

    python -m benchmarks.first_fit --layers=4,12,24

Each model, a BERT of so many layers of width 128, is trained for four steps of
32 texts of 64 tokens, by Keras and by DP-SGD, each in a process of its own.
Processor time counts all threads.
"""

import argparse
import json
import subprocess
import sys
import time

_STEPS, _BATCH, _LENGTH = 4, 32, 64


def measure(layers: int, private: bool) -> dict:
    """Seconds of the first `fit` of this process.

    Args:
        layers: int, of the encoder.
        private: bool, whether DP-SGD trains it.

    Returns:
        dict of floats: `wall` and `processor`.
    """
    import keras

    import tf_dpsub
    from benchmarks import steps

    model = steps.bert(layers, width=128, length=_LENGTH, frozen=False)
    x, y = steps.bert_data(_STEPS * _BATCH, _LENGTH)
    optimizer = keras.optimizers.SGD(0.01)
    if private:
        model = tf_dpsub.make_private(model)
        optimizer = tf_dpsub.optimizers.DPSGD(
            optimizer, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=_BATCH
        )
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    wall, processor = time.perf_counter(), time.process_time()
    model.fit(x, y, batch_size=_BATCH, verbose=0)
    return {
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
    }


def main():
    """Prints a line for each model and way of training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="4,12,24", help="Numbers of them.")
    parser.add_argument("--only", help="keras or dpsgd, in this process.")
    arguments = parser.parse_args()
    if arguments.only:
        found = measure(int(arguments.layers), arguments.only == "dpsgd")
        print(json.dumps(found))
        return
    for layers in arguments.layers.split(","):
        for way in ("keras", "dpsgd"):
            process = subprocess.run(
                [sys.executable, "-m", "benchmarks.first_fit"]
                + [f"--layers={layers}", f"--only={way}"],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            print(layers, way, process.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
