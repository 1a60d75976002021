"""Settings of all tests: a quiet TensorFlow, seeds, data, nothing skipped."""

import contextlib
import ctypes
import gc
import os
import random
import secrets
import sys

import pytest

from tests.stacks import without_stacks

if sys.dont_write_bytecode:
    # Each process would compile the modules of TensorFlow and Keras anew, which
    # takes longer than all else of importing them. The environment keeps what
    # is compiled, not the tree.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = sys.pycache_prefix or f"{sys.prefix}/pycache"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# TensorFlow reads these once, when it is first imported.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("MPLBACKEND", "agg")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores: threads inside them only compete.
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")


# Python makes a full collection whenever what is new is a quarter of what is
# old. Nothing is old where `fresh_module` froze it, so that these took a tenth
# of the suite. That fixture makes one after each file. Young objects are looked
# through less often, too: nearly all of a graph that is traced stays.
gc.set_threshold(10_000, 10, 7)


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="also run the tests marked slow"
    )


# Files with tests of a minute. These begin first, so that at the end no worker
# waits for another's.
_LONG = ("tests/tutorials_test.py", "tests/distribution_test.py")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def fail_if_skipped(report):
    """Turns a skip into a failure under CI, where it would look like a pass."""
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


_ENTROPY = random.Random()
_SEED = int(os.environ.get("TESTS_SEED", "0"))


@pytest.fixture(scope="session", autouse=True)
def same_entropy():
    """Makes the system's entropy in the package the same in each run.

    With fresh noise, samples and first bases, one of thousands of tests would
    fail by chance, once in a few runs. The variable TESTS_SEED chooses others,
    to find tests that pass by chance.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbits", _ENTROPY.getrandbits)
        patch.setattr(secrets, "token_bytes", _ENTROPY.randbytes)
        yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_stacks():
    """Stacks of operations are not extracted, where Keras is there at first."""
    if "keras" not in sys.modules:
        yield
        return
    with without_stacks():
        yield


# By the names of files, the states of their generators when they were imported.
_STATES: dict = {}


def _generators(module):
    """Random generators that the tests of a file share."""
    if "numpy" not in sys.modules:
        return []
    from numpy.random import Generator

    return [g for g in vars(module).values() if isinstance(g, Generator)]


@pytest.fixture(autouse=True)
def same_numbers(request, fresh_module):
    """Gives a test the same numbers, whichever tests of its file ran before."""
    generators = _generators(request.module)
    for generator, state in zip(generators, _STATES[request.module.__name__]):
        generator.bit_generator.state = state


@pytest.fixture(scope="module", autouse=True)
def fresh_module(request, same_entropy):
    """Gives fixtures of a file the same seeds, and frees memory."""
    _ENTROPY.seed(_SEED)
    module = request.module
    _STATES.setdefault(
        module.__name__,
        [generator.bit_generator.state for generator in _generators(module)],
    )
    yield
    if "keras" in sys.modules:
        # What was compiled of functions that are gone takes memory.
        sys.modules["keras"].utils.clear_session(free_memory=False)
    gc.collect()
    # What is still there belongs to libraries, most of it for ever: looking
    # through it at each collection would take a tenth of the suite.
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def fresh_state():
    """Gives each test the same seeds, and no names or policies of another."""
    _ENTROPY.seed(_SEED)
    keras = sys.modules.get("keras")
    if keras is not None:
        with _kept_kernels():
            # Collecting garbage each time would take most of the suite.
            keras.utils.clear_session(free_memory=False)
            keras.utils.set_random_seed(_SEED)


@contextlib.contextmanager
def _kept_kernels():
    """Keeps what TensorFlow has compiled of functions that tests share.

    Kernels that draw from TensorFlow's own generator keep its state, too: no
    test draws from it outside of functions of its own.
    """
    from tensorflow.python.eager import context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            context.pywrap_tfe, "TFE_ContextClearCaches", lambda handle: None
        )
        yield


@pytest.fixture(scope="session")
def data_dir():
    """The TensorFlow Datasets folder with the real data, TFDS_DATA_DIR."""
    return _folder(
        "TFDS_DATA_DIR",
        "a TensorFlow Datasets folder that holds mnist, fashion_mnist, cifar10 "
        "and glue/sst2",
    )


@pytest.fixture(scope="session")
def e2e_dir():
    """The folder with the real data of E2E, E2E_DATA_DIR."""
    return _folder("E2E_DATA_DIR", "a folder with the CSV files of E2E")


def _folder(variable, content):
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} does not name a folder with data")
    if not os.path.isdir(folder):
        pytest.fail(
            f"Expected {variable} to be a folder, got {folder}. Set it to "
            f"{content}."
        )
    return folder
