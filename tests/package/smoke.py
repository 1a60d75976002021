"""What a user has who installed the package, and nothing else.

    cd EMPTY_FOLDER; VENV/bin/python CLONE/tests/package/smoke.py [--nlp]

Run by the interpreter of an environment into which a wheel was installed, from
a folder outside of the clone. `--nlp` expects the extra of that name.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

PROGRAM = pathlib.Path(sys.executable).with_name("tf-dpsub")
CLONE = pathlib.Path(__file__).parents[2]


def output(*command):
    """What a command prints.

    Raises:
        RuntimeError: if it fails, with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def check(holds, what):
    print("ok  " if holds else "FAIL", what, flush=True)
    if not holds:
        sys.exit(1)


def check_files():
    import tf_dpsub

    (folder,) = tf_dpsub.__path__
    own = CLONE not in pathlib.Path(folder).resolve().parents
    # An environment may lie in the clone.
    own = own or "site-packages" in folder
    check(own, "tf_dpsub comes from the wheel")
    files = [str(f) for f in importlib.metadata.files("tf_dpsub")]
    check("tf_dpsub/py.typed" in files, "type hints are declared")
    version = importlib.metadata.version("tf_dpsub")
    packages = {f.split("/")[0] for f in files if not f.startswith("..")}
    check(
        packages == {"tf_dpsub", f"tf_dpsub-{version}.dist-info"},
        "nothing but the package is installed",
    )
    top = [importlib.util.find_spec(name) for name in ("configs", "launchers")]
    check(top == [None, None], "programs and configs take no names of others")


def check_example():
    """The example of the README, which is the description of the package."""
    description = importlib.metadata.metadata("tf_dpsub").get_payload()
    example = re.search(r"```python\n(.*?)```", description, re.DOTALL)[1]
    exec(compile(example, "README.md", "exec"), {})
    check(pathlib.Path("classifier.keras").exists(), "the README's example")
    told = output(
        sys.executable,
        "-c",
        "import sys, keras; keras.models.load_model('classifier.keras'); "
        "print('tf_dpsub' in sys.modules)",
    )
    check(told.split()[-1] == "False", "what it saved loads without tf_dpsub")


def check_commands():
    told = output(PROGRAM, "--help")
    check("tf-dpsub train" in told, "tf-dpsub --help")
    for command in ("account", "audit", "plan", "report", "reproduce"):
        output(PROGRAM, command, "--help")
    output(PROGRAM, "spectrum", "--help")
    told = output(
        PROGRAM,
        "train",
        "--config=configs/digits_dpsgd.py",
        "--config.epochs=2",
        "--workdir=run",
    )
    written = {path.name for path in pathlib.Path("run").iterdir()}
    check(
        {"model.keras", "privacy_statement.txt", "report.html"} <= written,
        "tf-dpsub train, with a config of the package",
    )
    logs = importlib.util.find_spec("tensorboard") is not None
    check(
        ("tensorboard" in written, "[tensorboard]" in told) == (logs, not logs),
        "logs for TensorBoard, or a line that names their extra",
    )
    pathlib.Path("run/report.html").unlink()
    output(PROGRAM, "report", "--workdir=run")
    check(pathlib.Path("run/report.html").exists(), "tf-dpsub report")


def check_mnist():
    import tf_dpsub

    if "TFDS_DATA_DIR" not in os.environ:
        print("skip MNIST: TFDS_DATA_DIR is not set", flush=True)
        return
    data = tf_dpsub.data.load("mnist", private=100)
    check(data.x_train.shape == (100, 28, 28, 1), "MNIST")


def check_language_models(expected):
    import tf_dpsub

    check(
        (importlib.util.find_spec("keras_hub") is not None) == expected,
        f"keras_hub is {'' if expected else 'not '}installed",
    )
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8}
    try:
        model = tf_dpsub.models.bert_classifier(
            sequence_length=8, **sizes, intermediate_dim=16
        )
    except ImportError as error:
        told = 'pip install "tf_dpsub[nlp]"' in str(error)
        check(told and not expected, "language models name what they need")
    else:
        check(expected and model.count_params() > 0, "language models build")


if __name__ == "__main__":
    check_files()
    if "--nlp" in sys.argv[1:]:
        check_language_models(True)
    else:
        check_example()
        check_commands()
        check_mnist()
        check_language_models(False)
