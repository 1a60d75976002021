"""What `make lint` says of imports that the contracts in setup.cfg forbid."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LINT = "from importlinter import cli; cli.lint_imports_command()"


@pytest.fixture
def tree(tmp_path):
    """A copy of what is linted, with configs and programs."""
    shutil.copytree(
        ROOT / "tf_dpsub",
        tmp_path / "tf_dpsub",
        ignore=lambda _, names: [n for n in names if n == "__pycache__"],
    )
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def lint(tree):
    done = subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_tree_keeps_all_contracts(tree):
    code, text = lint(tree)
    assert code == 0, text
    assert "0 broken" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, code, broken",
    [
        (
            "tf_dpsub/primitives/more.py",
            "from tf_dpsub.training import workers",
            "those of lower layers alone",
        ),
        (
            "tf_dpsub/auditing/more.py",
            "from tf_dpsub.planning import signals",
            "those of lower layers alone",
        ),
        ("tf_dpsub/more/a.py", "", "those of lower layers alone"),
        (
            "tf_dpsub/training/more.py",
            "from tf_dpsub.launchers.terminal import program",
            "those of lower layers alone",
        ),
        (
            "tf_dpsub/launchers/training/more.py",
            "from launchers.terminal import program",
            "have one name",
        ),
        (
            "tf_dpsub/configs/more.py",
            "from tf_dpsub.launchers import train",
            "those of lower layers alone",
        ),
        (
            "tf_dpsub/launchers/report.py",
            "from tf_dpsub.launchers import train",
            "not each other",
        ),
        ("tf_dpsub/launchers/more.py", "", "not each other"),
        (
            "tf_dpsub/checks.py",
            "def late():\n    from tf_dpsub import files\n    return files",
            "in a circle",
        ),
        (
            "tf_dpsub/callbacks/more.py",
            "import tf_dpsub\n\nmodel = tf_dpsub.make_private",
            "what the top of the package loads",
        ),
        (
            "tf_dpsub/analysis/more.py",
            "def late():\n    import tensorflow as tf\n    return tf",
            "need no TensorFlow",
        ),
    ],
)
def test_a_wrong_import_fails(tree, path, code, broken):
    file = tree / path
    if not file.parent.exists():
        file.parent.mkdir()
        (file.parent / "__init__.py").touch()
    file.write_text(code + "\n")
    if path == "tf_dpsub/checks.py":
        with open(tree / "tf_dpsub" / "files.py", "a") as other:
            other.write("\nfrom tf_dpsub import checks\n")
    status, text = lint(tree)
    assert status == 1, text
    assert any(
        broken in line and " BROKEN" in line for line in text.splitlines()
    ), text
