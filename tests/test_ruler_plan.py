"""What RULER plans: lengths that are too small, absent or substituted data, impossible requests."""

import json
import shutil
from pathlib import Path

import pytest

from eval import data
from eval.records import TaskError
from eval.ruler import TASKS, RulerConfig, RulerSuite, length_statistics
from eval.ruler.fitting import DoesNotFit, Draft, ImpossibleSize, Setting, SizedGenerator
from tests.ruler_data import require, write_hotpotqa, write_squad
from tests.ruler_tokenizer import build, load_smollm2

REAL = ("ruler/essays", "ruler/squad", "ruler/hotpotqa", "nltk/punkt_tab", "model/smollm2_135m")


@pytest.fixture(scope="module")
def smollm2():
    require(*REAL)
    return load_smollm2()


@pytest.fixture(scope="module")
def pieces():
    return build()


@pytest.fixture
def make(tmp_path):
    def suite(tokenizer, context=2**20, **options):
        options = {"length": 1024, "samples": 5, "cache_dir": str(tmp_path / "cache"), **options}
        return RulerSuite(RulerConfig(**options), tokenizer, "smollm2", context)

    return suite


@pytest.fixture
def offline(monkeypatch):
    def unavailable(name):
        raise data.SourceUnavailable(name, "no network")

    monkeypatch.setattr(data, "resolve", unavailable)


@pytest.mark.parametrize(("length", "too_long"), [(1024, {"qa_1", "qa_2"}), (2048, {"qa_2"})])
def test_tasks_that_cannot_fit_are_skipped_and_the_others_fit(make, smollm2, length, too_long):
    suite = make(smollm2, length=length)
    plan = suite.plan()
    assert {skip.task for skip in plan.skipped} == too_long
    assert all(str(length) in skip.reason and not skip.source_missing for skip in plan.skipped)
    assert plan.tasks == tuple(task for task in TASKS if task not in too_long)
    assert f"average over {len(plan.tasks)} of the 13 tasks" in plan.notes
    for task in plan.tasks:
        samples = suite.samples(task)
        assert [sample.index for sample in samples] == list(range(5))
        assert length_statistics(samples).max + TASKS[task].prompt.max_new_tokens <= length


@pytest.mark.parametrize(("length", "task"), [(1024, "qa_1"), (2048, "qa_2")])
def test_named_task_that_cannot_fit_is_an_error(make, smollm2, length, task):
    with pytest.raises(TaskError, match=rf"task.length={length}: too small for {task}"):
        make(smollm2, length=length, tasks=("niah_single_1", task)).plan()


def test_length_too_small_for_every_task(make, pieces, offline):
    with pytest.raises(TaskError, match=r"task.length=40: too small for every task"):
        make(pieces, length=40, tasks=None, data_dir=None).plan()


def test_length_beyond_the_context(make, pieces):
    with pytest.raises(TaskError, match=r"task.length=4096: .*context of 2048"):
        make(pieces, context=2048, length=4096)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("niah_single_9",)}, r"unknown RULER task 'niah_single_9'; accepted: niah_single_1, "),
        ({"tasks": ()}, "no task is named"),
        ({"samples": 0}, "task.samples=0"),
        ({"samples": 2.5}, "task.samples=2.5"),
        ({"length": -1}, "task.length=-1"),
        ({"length": True}, "task.length=True"),
        ({"seed": 2**32}, "task.seed=4294967296"),
        ({"template": "llama"}, "task.template='llama': .*accepted: auto, base, "),
        ({"data_dir": "absent"}, "task.data_dir=absent: no such folder; accepted: a folder with one or more of squad"),
        ({"data_dir": str(Path(__file__).parent)}, "tests: holds no file of RULER's; accepted: a folder with"),
    ],
)
def test_impossible_configurations(options, message):
    with pytest.raises(TaskError, match=message):
        RulerConfig(**{"length": 4096, **options})


def test_absent_sources_are_skips_marked_as_missing(make, pieces, offline):
    plan = make(pieces, length=4096).plan()
    missing = {skip.task for skip in plan.skipped if skip.source_missing}
    assert missing == {task for task in TASKS if TASKS[task].sources}
    assert plan.tasks == ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    remedy = r"no network; or set task.data_dir= to a folder that holds squad.json$"
    with pytest.raises(TaskError, match=rf"^no RULER task can run: qa_1: .*{remedy}"):
        make(pieces, length=4096, tasks=("qa_1",)).plan()
    essays = {skip.reason for skip in plan.skipped if skip.task.startswith("niah")}
    assert any(reason.endswith("a folder that holds PaulGrahamEssays.json") for reason in essays)


def test_what_several_tasks_lack_is_said_once(make, pieces, offline):
    tasks = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "qa_1")
    with pytest.raises(TaskError) as caught:
        make(pieces, length=4096, tasks=tasks).plan()
    said = str(caught.value)
    assert said.count("PaulGrahamEssays.json") == said.count("squad.json") == 1
    assert "niah_single_2 and 3 others: data cannot be had: ruler/essays: no network" in said


def test_own_files_take_the_place_of_the_fetched_ones(make, pieces, offline, tmp_path):
    write_squad(tmp_path)
    write_hotpotqa(tmp_path)
    suite = make(pieces, length=4096, tasks=("qa_1", "qa_2"), data_dir=str(tmp_path))
    plan = suite.plan()
    assert plan.tasks == ("qa_1", "qa_2")
    assert not plan.official
    assert "ruler/squad: not the official file" in plan.notes
    assert suite.samples("qa_2")[3].references == ("Person 3",)
    with pytest.raises(TaskError, match=r"^task.samples=41: qa_1 has 40 questions; accepted: 1 to 40$"):
        make(pieces, length=4096, samples=41, tasks=("qa_1",), data_dir=str(tmp_path)).plan()


def test_substitute_haystack_is_marked(make, pieces, tmp_path):
    require("nltk/punkt_tab")
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "A short sentence stands here. " * 900}))
    plan = make(pieces, length=4096, tasks=("niah_single_2",), data_dir=str(tmp_path)).plan()
    assert not plan.official
    assert any("substitute haystack" in note for note in plan.notes)


def test_unreadable_data_file_is_named(make, pieces, tmp_path):
    (tmp_path / "squad.json").write_text("not json")
    expected = r"ruler/squad: .*squad.json is not what is expected here \(.*\); accepted: a JSON file laid out as"
    with pytest.raises(TaskError, match=expected):
        make(pieces, length=4096, tasks=("qa_1",), data_dir=str(tmp_path)).plan()


def squad_file(context="About it.", **question):
    asked = {"question": "What?", "answers": [{"text": "it"}], "is_impossible": False, **question}
    return {"data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]}


def hotpot_file(**changes):
    return [{"question": "What?", "answer": "it", "context": [["About", ["It is. ", ""]]], **changes}]


ESSAYS, SQUAD, HOTPOT, WORDS = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json", "english_words.json"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (ESSAYS, {"text": ""}, 'field text is ""; accepted: a string that is not blank'),  # gave prompts of 83 tokens
        (ESSAYS, {"text": " \n"}, 'field text is " \\n"; accepted: a string that is not blank'),
        (ESSAYS, {"text": 5}, "field text is 5; accepted: a string that is not blank"),
        (ESSAYS, {"essays": "A"}, "field text is missing; accepted: an object with text"),
        (ESSAYS, ["A"], 'the whole file is ["A"]; accepted: an object with text'),
        (SQUAD, {"data": []}, "field data is []; accepted: a list that is not empty"),
        (SQUAD, squad_file(5), "field data[0].paragraphs[0].context is 5; accepted: a string that is not blank"),
        (SQUAD, squad_file(question=None), "field data[0].paragraphs[0].qas[0].question is null; accepted: a string"),
        (SQUAD, squad_file(answers=[]), "field data[0].paragraphs[0].qas[0].answers is []; accepted: a list that is"),
        (SQUAD, squad_file(answers=[{"text": ""}]), 'field data[0].paragraphs[0].qas[0].answers[0].text is ""; acc'),
        (SQUAD, squad_file(is_impossible=0), "field data[0].paragraphs[0].qas[0].is_impossible is 0; accepted: true"),
        (SQUAD, squad_file(is_impossible=True), "field data has no question with is_impossible false; accepted: one"),
        (HOTPOT, {}, "the whole file is {}; accepted: a list that is not empty"),
        (HOTPOT, hotpot_file(answer=""), 'field [0].answer is ""; accepted: a string that is not blank'),
        (HOTPOT, hotpot_file(context=[["About"]]), 'field [0].context[0] is ["About"]; accepted: a list of title and'),
        (HOTPOT, hotpot_file(context=[["About", [3]]]), "field [0].context[0][1][0] is 3; accepted: a string"),
        (WORDS, {"0": 5}, "field 0 is 5; accepted: a string that is not blank"),  # was taken for the word 5
        (WORDS, {}, "the whole file is {}; accepted: an object with one entry or more"),
    ],
)
def test_a_data_file_with_a_wrong_field_is_refused_when_the_run_is_planned(make, pieces, tmp_path, file, content, said):
    (tmp_path / file).write_text(json.dumps(content))
    task = {ESSAYS: "niah_single_2", SQUAD: "qa_1", HOTPOT: "qa_2", WORDS: "cwe"}[file]
    with pytest.raises(TaskError) as refused:
        make(pieces, length=4096, samples=1, tasks=(task,), data_dir=str(tmp_path)).plan()
    assert f"{tmp_path / file}: {said}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fields_that_no_prompt_needs_may_be_anything(make, pieces, tmp_path):
    content = squad_file()
    content["data"][0]["paragraphs"][0]["qas"].append({"is_impossible": True, "question": None})
    (tmp_path / SQUAD).write_text(json.dumps(content))
    (tmp_path / HOTPOT).write_text(json.dumps(hotpot_file(context=[["", []], ["About", ["It is."]]], type="bridge")))
    plan = make(pieces, length=4096, samples=1, tasks=("qa_1", "qa_2"), data_dir=str(tmp_path)).plan()
    assert plan.tasks == ("qa_1", "qa_2")


@pytest.mark.parametrize("damage", ["removed", "no number"])
def test_a_sentence_splitter_of_the_users_is_checked_and_has_prompts_of_its_own(
    make, pieces, tmp_path, monkeypatch, damage
):
    require("nltk/punkt_tab")
    own = tmp_path / "punkt"
    shutil.copytree(data.resolve("nltk/punkt_tab") / "english", own / "english")
    (tmp_path / ESSAYS).write_text(json.dumps({"text": "A short sentence stands here. " * 900}))
    suite = make(pieces, length=4096, tasks=("niah_single_2",), data_dir=str(tmp_path))
    official = suite.sources.fingerprint(["nltk/punkt_tab"], long_list=False)
    monkeypatch.setenv("FFD_DATA_NLTK_PUNKT_TAB", str(own))
    file = own / "english" / "ortho_context.tab"
    file.write_text(file.read_text().rstrip("\n") + "\nffd\t1\n")
    changed = make(pieces, length=4096, tasks=("niah_single_2",), data_dir=str(tmp_path))
    assert (
        changed.sources.fingerprint(["nltk/punkt_tab"], long_list=False) != official
    )  # prompts of the other were read
    assert "nltk/punkt_tab: not the official file" in changed.plan().notes
    if damage == "removed":
        file.unlink()
    else:
        file.write_text("ffd\tmany\n")
    with pytest.raises(TaskError, match=r"^nltk/punkt_tab: .*punkt.*accepted: a folder whose english/ holds NLTK's"):
        make(pieces, length=4096, tasks=("niah_single_2",), data_dir=str(tmp_path)).plan()


def test_another_seed_is_not_the_official_protocol(make, pieces):
    assert not make(pieces, tasks=("vt",), seed=7).plan().official


class Stubborn(SizedGenerator):
    """A generator whose samples never fit, or cannot be drawn below its first size."""

    def __init__(self, setting, possible):
        super().__init__(setting, max_new_tokens=1, step=10)
        self.possible, self.draws = possible, 0

    def search(self):
        return 17

    def draw(self, size, index):
        self.draws += 1
        if size < 10 and not self.possible:
            raise ImpossibleSize(f"{size} is too few")
        return Draft("x" * 101 + str(self.draws), ())


@pytest.mark.parametrize(("possible", "message"), [(True, "needs 10[0-9] tokens"), (False, "7 is too few")])
def test_fitting_that_officially_never_ends_does_end(possible, message):
    setting = Setting("", 100, 0, 42, len)
    with pytest.raises(DoesNotFit, match=message):
        list(Stubborn(setting, possible).samples(1))
