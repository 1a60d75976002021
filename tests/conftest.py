"""What every test shares: a quiet TensorFlow, seeds, data, nothing skipped."""

import os
import sys

import pytest

# TensorFlow reads these once, when it is first imported.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("MPLBACKEND", "agg")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores: threads inside them only compete.
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="also run the tests marked slow"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def fail_if_skipped(report):
    """Turns a skip into a failure under CI, where it would pass for a pass."""
    if (
        report.skipped
        and os.environ.get("CI")
        and not hasattr(report, "wasxfail")
    ):
        path, line, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: {reason}. CI runs every test."
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    return fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    return fail_if_skipped((yield))


@pytest.fixture(autouse=True)
def fresh_state():
    """Gives each test the same seeds, and no names or policies of another."""
    keras = sys.modules.get("keras")
    if keras is not None:
        # Collecting garbage each time would take most of the suite.
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def data_dir():
    """The TensorFlow Datasets folder with the real data, TFDS_DATA_DIR."""
    folder = os.environ.get("TFDS_DATA_DIR")
    if not folder:
        pytest.skip("TFDS_DATA_DIR does not name a folder with data")
    if not os.path.isdir(folder):
        pytest.fail(
            f"Expected TFDS_DATA_DIR to be a folder, got {folder}. Set it to "
            "a TensorFlow Datasets folder that holds mnist, fashion_mnist, "
            "cifar10 and glue/sst2."
        )
    return folder
