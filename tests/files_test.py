"""Files are replaced as a whole, and only their owner can read them."""

import os
import stat

import pytest

from tf_dpsub import files


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_by_a_private_one_with_its_ending(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("earlier", "utf-8")
    path.chmod(0o644)

    def write(incomplete):
        assert incomplete.suffix == ".keras"
        assert incomplete.parent == tmp_path
        incomplete.write_text("new", "utf-8")
        assert _mode(incomplete) == 0o600
        assert path.read_text("utf-8") == "earlier"

    files.replace(path, write)
    assert path.read_text("utf-8") == "new"
    assert _mode(path) == 0o600
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_earlier_file(tmp_path, error):
    path = tmp_path / "metrics.csv"
    files.write_text(path, "earlier")

    def write(incomplete):
        incomplete.write_text("ne", "utf-8")
        raise error

    with pytest.raises(error):
        files.replace(path, write)
    assert path.read_text("utf-8") == "earlier"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_durable_before_it_replaces_another(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (calls.append("fsync"), sync(handle))
    )
    monkeypatch.setattr(
        os, "replace", lambda *paths: (calls.append("replace"), replace(*paths))
    )
    files.write_text(tmp_path / "ledger.json", "{}")
    assert calls == ["fsync", "replace", "fsync"]


def test_incomplete_files_of_killed_processes_are_removed(tmp_path):
    writes = []
    files.replace(
        tmp_path / "a.npz",
        lambda incomplete: writes.append(
            (incomplete, incomplete.write_text("x"))
        ),
    )
    (incomplete, _), folder = (
        writes[0],
        files.make_folder(tmp_path / "run" / "b"),
    )
    assert _mode(folder) == 0o700
    (folder / incomplete.name).write_text("half", "utf-8")
    assert files.is_empty(folder)
    files.remove_incomplete(folder)
    assert not [*folder.iterdir()]
    files.write_text(folder / "c", "whole")
    files.remove_incomplete(folder)
    assert not files.is_empty(folder)


_NO_OBJECTS = {
    "empty": b"",
    "cut": b'{"epochs": 1',
    "list": b"[1]",
    "binary": b"\x88\xff",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", _NO_OBJECTS.values(), ids=_NO_OBJECTS)
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json as it was written"):
        files.read_json(path)


def test_json_can_be_read_by_people_too(tmp_path):
    path = tmp_path / "result.json"
    files.write_json(path, {"ε": 2.0}, allow_nan=False)
    assert path.read_text("utf-8") == '{\n  "ε": 2.0\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(path, {"ε": float("inf")}, allow_nan=False)
    assert files.read_json(path) == {"ε": 2.0}


def test_a_missing_field_is_named_with_its_file(tmp_path):
    path = tmp_path / "result.json"
    path.write_text('{"config": {"epochs": 3}}', "utf-8")
    content = files.read_json(path)
    assert content == {"config": {"epochs": 3}}
    assert content.get("summary") is None and "summary" not in content
    for fields, name in ((content, "summary"), (content["config"], "model")):
        with pytest.raises(ValueError, match=rf"result\.json .* '{name}', got"):
            fields[name]


def test_json_of_another_kind(tmp_path):
    path = tmp_path / "commands.json"
    path.write_text('["tf-dpsub"]', "utf-8")
    assert files.read_json(path, list) == ["tf-dpsub"]
