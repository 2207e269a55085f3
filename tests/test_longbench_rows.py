"""Reading LongBench data: folders, the zip, and one clear line for every fault."""

import json
import zipfile

import pytest

from eval.longbench.rows import open_source
from eval.records import TaskError


def row(**changes):
    fields = {
        "input": "Who?",
        "context": "Some text.",
        "answers": ["Ada"],
        "length": 3,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "0",
    }
    return fields | changes


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("inner", ["qasper.jsonl", "data/qasper.jsonl"])
@pytest.mark.parametrize("zipped", [False, True])
def test_folder_and_zip_read_alike(tmp_path, inner, zipped):
    # A line separator inside a JSON string does not end the row.
    write(tmp_path / "in" / inner, row(), row(_id="1", context="a\u2028b"))
    path = tmp_path / "in"
    if zipped:
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tmp_path / "in" / inner, inner)
            archive.writestr("__MACOSX/data/._qasper.jsonl", b"\x00\xff")
    source = open_source(path)
    assert set(source.members) == {"qasper"}
    assert source.count("qasper") == 2
    assert [r.id for r in source.read("qasper")] == ["0", "1"]
    assert [r.context for r in source.read("qasper")] == ["Some text.", "a\u2028b"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qasper", {"answers": "Ada"}, "line 2: field 'answers' is \"Ada\"; accepted: a list of strings"),
        ("qasper", {"answers": [3]}, "field 'answers' is [3]; accepted: a list of strings"),
        ("qasper", {"length": "3"}, "field 'length' is \"3\"; accepted: an integer"),
        ("qasper", {"context": None}, "field 'context' is null; accepted: a string"),
        ("trec", {}, "field 'all_classes' is null; accepted: a non-empty list of strings"),
        ("trec_e", {"all_classes": []}, "field 'all_classes' is []; accepted: a non-empty list of strings"),
    ],
)
def test_rows_outside_the_schema_are_named(tmp_path, name, changes, message):
    write(tmp_path / f"{name}.jsonl", row(all_classes=["x"]), row(**changes))
    with pytest.raises(TaskError) as caught:
        list(open_source(tmp_path).read(name))
    assert message in str(caught.value)
    assert f"{name}.jsonl, line 2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1: not JSON"),
        (b"[1]", "line 1: a JSON list; accepted: an object"),
        (b"{}", "line 1: field 'input' is missing"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_not_rows_are_named(tmp_path, content, message):
    (tmp_path / "qasper.jsonl").write_bytes(content)
    with pytest.raises(TaskError, match=message) as caught:
        list(open_source(tmp_path).read("qasper"))
    assert "qasper.jsonl" in str(caught.value)


def test_a_folder_named_like_a_file_cannot_be_read(tmp_path):
    (tmp_path / "qasper.jsonl").mkdir()
    with pytest.raises(TaskError, match=r"qasper\.jsonl: cannot be read"):
        open_source(tmp_path).count("qasper")


def test_a_damaged_zip_member_is_named(tmp_path):
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(row()))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"Some text.", b"Same text."))
    with pytest.raises(TaskError, match=r"data\.zip/data/qasper\.jsonl: cannot be unpacked"):
        list(open_source(path).read("qasper"))


def test_sources_that_are_none(tmp_path):
    with pytest.raises(TaskError, match="does not exist"):
        open_source(tmp_path / "absent")
    with pytest.raises(TaskError, match="no LongBench file"):
        open_source(tmp_path)
    (tmp_path / "data.zip").write_text("not a zip")
    with pytest.raises(TaskError, match=r"data\.zip: cannot be unpacked"):
        open_source(tmp_path / "data.zip")
    write(tmp_path / "qasper.jsonl", row())
    write(tmp_path / "data" / "qasper.jsonl", row())
    with pytest.raises(TaskError, match="two files of qasper"):
        open_source(tmp_path)
