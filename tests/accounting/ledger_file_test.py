import fcntl
import itertools
import json
import math
import os
import threading

import pytest

from tests.accounting.entries import (
    ALLOCATION,
    BATCHES,
    POISSON,
    changed,
    ledger_of,
)
from tf_dpsub import files
from tf_dpsub.accounting import LedgerEntry, PrivacyLedger

# As version 0.1.0 wrote it.
TEXT = """\
{
  "format": "tf_dpsub privacy ledger",
  "version": 1,
  "entries": [
    {
      "name": "00000000000000000000000000000002",
      "mechanism": "DPSGD",
      "noise_multiplier": 0.0,
      "l2_norm_clip": "inf",
      "batch_size": 150,
      "examples": null,
      "sampler": "batches",
      "each_example_once_per_epoch": true,
      "fixed_seed": true,
      "private_selection": false,
      "private_state": false,
      "steps": 4,
      "epochs": 2,
      "notes": [
        "a 'b'",
        "\\u00fc"
      ],
      "uncovered": []
    }
  ],
  "sha256": "5c5de3f193fb655d897cdbf5e5f0499bb7227e98a9f50871569428c73dee9c47"
}"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.json"


class TestFormat:
    def test_epochs_with_random_steps_are_read_again(self):
        ledger = ledger_of((ALLOCATION, 7, 1), (POISSON, 5))
        text = ledger.to_json()
        fields = [set(entry) for entry in json.loads(text)["entries"]]
        assert fields[0] - fields[1] == {"epoch_steps"}
        assert PrivacyLedger.from_json(text).entries == ledger.entries

    def test_text_is_read_and_written_byte_for_byte(self):
        ledger = PrivacyLedger.from_json(TEXT)
        assert ledger.entries == (
            LedgerEntry(
                mechanism="DPSGD",
                noise_multiplier=0.0,
                l2_norm_clip=math.inf,
                batch_size=150,
                examples=None,
                sampler="batches",
                each_example_once_per_epoch=True,
                fixed_seed=True,
                steps=4,
                epochs=2,
                notes=("a 'b'", "ü"),
            ),
        )
        assert ledger.to_json() == TEXT

    def test_ledger_from_before_there_were_subspaces(self):
        """It has no steps in one."""
        ledger = ledger_of((POISSON, 3, 1), (BATCHES, 2))
        content = json.loads(ledger.to_json())
        del content["sha256"]
        for entry in content["entries"]:
            assert entry.pop("private_state") is False
            assert entry.pop("uncovered") == []
            # Only where there was one.
            assert "target" not in entry
        found = PrivacyLedger.from_json(json.dumps(content))
        assert found.entries == ledger.entries

    def test_a_target_is_kept(self):
        found = changed(POISSON, target="(ε = 2, δ = 1e-05)")
        ledger = ledger_of((found, 3, 1))
        again = PrivacyLedger.from_json(ledger.to_json())
        assert again.entries == ledger.entries
        assert again.entries[0].target == "(ε = 2, δ = 1e-05)"


def damaged(edit):
    def apply(text):
        content = json.loads(text)
        # Each kind of damage is noticed for itself.
        del content["sha256"]
        edit(content)
        return json.dumps(content)

    return apply


class TestDamage:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: "",
            lambda text: text[:-20],
            lambda text: "[1, 2]",
            lambda text: '"tf_dpsub privacy ledger"',
            lambda text: '{"loss": [0.5]}',
            damaged(lambda content: content.update(format="other")),
            damaged(lambda content: content.update(version=2)),
            damaged(lambda content: content.pop("entries")),
            damaged(lambda content: content.update(entries=7)),
            damaged(lambda content: content["entries"].append(7)),
            damaged(
                lambda content: content["entries"].append(content["entries"][0])
            ),
            damaged(lambda content: content["entries"][0].pop("name")),
            damaged(lambda content: content["entries"][0].pop("steps")),
            damaged(lambda content: content["entries"][0].update(steps=-1)),
            damaged(lambda content: content["entries"][0].update(steps=1.5)),
            damaged(lambda content: content["entries"][0].update(more=1)),
            damaged(
                lambda content: content["entries"][0].update(private_state="no")
            ),
            damaged(
                lambda content: content["entries"][0].update(
                    noise_multiplier="2"
                )
            ),
        ],
    )
    def test_is_refused_and_left_alone(self, damage, path):
        text = damage(ledger_of((POISSON, 30)).to_json())
        path.write_text(text)
        with pytest.raises(ValueError, match="The file was left as it is") as e:
            PrivacyLedger(path)
        assert str(path) in str(e.value)
        assert path.read_text() == text
        with pytest.raises(ValueError, match="Expected a tf_dpsub privacy led"):
            PrivacyLedger.from_json(text)

    def test_no_flipped_bit_lowers_epsilon(self):
        ledger = ledger_of((POISSON, 1234))
        good = ledger.to_json().encode()
        for place, bit in itertools.product(range(len(good)), range(8)):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            try:
                found = PrivacyLedger.from_json(bytes(bad)).entries
            except ValueError:
                continue
            assert found == ledger.entries, bad[place - 20 : place + 20]

    def test_other_fields_beside_the_entries(self):
        content = json.loads(ledger_of((POISSON, 3)).to_json())
        content["sha257"] = content.pop("sha256")
        with pytest.raises(ValueError, match="it has .'sha257'"):
            PrivacyLedger.from_json(json.dumps(content))

    def test_bytes_that_are_no_text(self, path):
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="The file was left as it is"):
            PrivacyLedger(path)


def test_of_two_that_write_at_once_the_second_is_refused(path, monkeypatch):
    first, second = PrivacyLedger(path), PrivacyLedger(path)
    refused = []

    def charge_second():
        try:
            second.charge(POISSON, 1, planned=1)
        except RuntimeError as error:
            refused.append(str(error))

    other = threading.Thread(target=charge_second)
    write = files.write_bytes

    def interrupted(*args):
        """The second begins to write while the first does."""
        if not other.is_alive():
            other.start()
            other.join(timeout=0.2)
        write(*args)

    monkeypatch.setattr(files, "write_bytes", interrupted)
    first.charge(POISSON, 1, planned=1)
    other.join()
    assert ["Two runs must not share a ledger" in text for text in refused] == [
        True
    ]
    assert PrivacyLedger(path).steps == 1


def test_writes_into_a_folder_that_is_locked(path, tmp_path):
    """As a run's folder is, by the process that writes the ledger."""
    ledger = PrivacyLedger(path)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        ledger.charge(POISSON, 1, planned=1)
    finally:
        os.close(handle)
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.json"]


def test_a_lock_leaves_no_file(path, tmp_path, monkeypatch):
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(locks))
    with files.locked(path):
        (lock,) = locks.iterdir()
        # Whoever was waiting for a file that is gone takes a new one.
        lock.unlink()
    with files.locked(path):
        assert len(list(locks.iterdir())) == 1
    assert not list(locks.iterdir())
