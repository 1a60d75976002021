"""A run goes on with its own ledger and data, or not at all."""

import json
import shutil
import stat

import numpy as np
import pytest

from tests.launchers.digits import StopAt, digits_config
from tests.launchers.programs import contents
from tf_dpsub import accounting
from tf_dpsub.launchers.training import (
    objects,
    resumption,
    run_directory,
    training_run,
)

EXAMPLES, STEPS_PER_EPOCH = 90, 3


class Killed(Exception):
    pass


def kill():
    raise Killed


def write_data(path, examples=EXAMPLES, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(examples, 4)).astype("float32")
    labels = (x[:, 0] > 0).astype("int64")
    np.savez(
        path,
        x_train=x,
        y_train=labels,
        x_test=x[:20] + 1,
        y_test=labels[:20],
    )


@pytest.fixture(name="data", scope="module")
def _data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.npz"
    write_data(path)
    return path


def config_of(data):
    return digits_config(
        dataset=str(data),
        batch_size=30,
        epochs=3,
        epsilon=None,
        noise_multiplier=2.0,
    )


def run(data, workdir):
    # Another process would load the data again.
    objects._load.cache_clear()
    return training_run.train(
        config_of(data), workdir, resume=True, results_only=True
    )


@pytest.fixture(name="begun", scope="module")
def _begun(data, tmp_path_factory):
    """A run that ended in the second step of its second epoch."""
    workdir = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # A killed process does not give its block of steps back.
        patch.setattr(accounting.PrivacyLedger, "settle", lambda self: None)
        StopAt(patch, 2, 2, kill)
        with pytest.raises(Killed):
            run(data, workdir)
    return workdir


@pytest.fixture(name="workdir")
def _workdir(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    return tmp_path / "run"


def refused(data, workdir, message):
    before = contents(workdir)
    with pytest.raises(ValueError, match=message):
        run(data, workdir)
    assert contents(workdir) == before


class TestLedger:
    def test_is_there_before_the_config(self, tmp_path, monkeypatch):
        seen = []
        write = run_directory.RunDirectory.write_json

        def spy(directory, name, value):
            seen.append((name, (directory.path / "ledger.json").exists()))
            if name == "config.json":
                kill()
            write(directory, name, value)

        monkeypatch.setattr(run_directory.RunDirectory, "write_json", spy)
        ledger = accounting.PrivacyLedger(tmp_path / "run" / "ledger.json")
        for _ in range(2):
            with run_directory.RunDirectory(tmp_path / "run", {}) as directory:
                assert not directory.exists
                with pytest.raises(Killed):
                    directory.begin(
                        lambda: resumption.begin(directory, ledger, {})
                    )
        assert seen == 2 * [("data.json", True), ("config.json", True)]

    def test_of_another_run_is_left_alone(self, tmp_path):
        ledger = accounting.PrivacyLedger(tmp_path / "ledger.json")
        ledger.charge(
            accounting.LedgerEntry(
                mechanism="DPSGD",
                noise_multiplier=1.0,
                l2_norm_clip=1.0,
                batch_size=1,
                examples=2,
                sampler="poisson",
            )
        )
        with pytest.raises(ValueError, match="holds other files"):
            run_directory.RunDirectory(tmp_path, {})
        (tmp_path / "ledger.json").write_text("{")
        with pytest.raises(ValueError, match="holds other files"):
            run_directory.RunDirectory(tmp_path, {})

    def test_that_is_gone(self, data, workdir):
        (workdir / "ledger.json").unlink()
        refused(data, workdir, "the ledger of the run, got none")

    def test_that_is_empty(self, data, workdir):
        (workdir / "ledger.json").unlink()
        accounting.PrivacyLedger(workdir / "ledger.json").create()
        refused(data, workdir, r"at least 1 steps, as .*metrics.csv .* of 0:")

    def test_that_knows_less_than_the_checkpoint(self, data, workdir):
        file = workdir / "ledger.json"
        content = json.loads(file.read_text("utf-8"))
        content["entries"][0]["steps"] = 1
        # An earlier version wrote no digest.
        del content["sha256"]
        file.write_text(json.dumps(content), "utf-8")
        refused(data, workdir, r"at least 3 steps, as .*epoch_000001.* of 1:")

    def test_that_was_damaged(self, data, workdir):
        file = workdir / "ledger.json"
        file.write_text(file.read_text("utf-8").replace(": 2.0", ": 3.0"))
        refused(data, workdir, "not those of its SHA-256")

    def test_is_not_written_by_a_dry_run(self, data, workdir, capsys):
        before = contents(workdir)
        training_run.announce(config_of(data), workdir, resume=True)
        assert "resumed" in capsys.readouterr().out
        assert contents(workdir) == before


class TestData:
    def test_are_compared_by_a_file_of_the_owner(self, workdir):
        file = workdir / "data.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        content = json.loads(file.read_text("utf-8"))
        assert content["examples"] == EXAMPLES

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"examples": 270}, "others: examples 90 there and 270 here, "),
            ({"seed": 1}, "others: other values. Give it the same data"),
        ],
    )
    def test_others_are_refused(
        self, data, workdir, tmp_path, changes, message
    ):
        content = data.read_bytes()
        try:
            write_data(data, **changes)
            refused(data, workdir, message)
            (workdir / "data.json").unlink()
            if "examples" in changes:
                refused(data, workdir, "examples 90 there and 270 here. Give")
        finally:
            data.write_bytes(content)
            objects._load.cache_clear()

    def test_of_every_kind_are_described(self):
        x = {"ids": np.arange(12).reshape(6, 2), "mask": np.ones((6, 2))}
        y = np.array(["a", "b"] * 3, object)
        first = resumption.digest_of(x, y)
        assert json.loads(json.dumps(first)) == first
        for other in (
            resumption.digest_of(x, y[::-1]),
            resumption.digest_of({**x, "mask": np.zeros((6, 2))}, y),
        ):
            assert other["sha256"] != first["sha256"]


def test_goes_on_and_leaves_no_digest(data, workdir):
    result = run(data, workdir)
    # The block that was under way counts as spent.
    assert result["steps"] == 2 * STEPS_PER_EPOCH + 2 * STEPS_PER_EPOCH
    assert not (workdir / "data.json").exists()


class TestDamage:
    @pytest.mark.parametrize("name", ["config", "data", "result"])
    @pytest.mark.parametrize("text", ["", "{", "[1]"])
    def test_of_json(self, data, workdir, name, text):
        (workdir / f"{name}.json").write_text(text, "utf-8")
        refused(data, workdir, rf"Expected .*{name}\.json as it was written")

    def test_a_result_without_fields(self, data, workdir):
        (workdir / "result.json").write_text("{}", "utf-8")
        refused(data, workdir, r"result\.json as it was written")

    @pytest.mark.parametrize(
        "content",
        [b"a,b\n1,2\n", b"epoch,loss\n1\n", b"epoch\ninf\n", b"epoch\n\xff"],
        ids=["other", "cut", "infinite", "binary"],
    )
    def test_of_metrics(self, data, workdir, content):
        (workdir / "metrics.csv").write_bytes(content)
        refused(data, workdir, r"Expected .*metrics\.csv as it was written")

    def test_a_checkpoint_of_another_name(self, data, workdir):
        name = "epoch_abc.weights.h5"
        (workdir / "checkpoint" / name).write_bytes(b"x")
        refused(data, workdir, rf"names like epoch_000001\..*got .*{name}")
