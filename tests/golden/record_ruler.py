"""Record hashes of the official RULER generators' outputs, for tests/test_ruler_golden.py.

    python tests/golden/record_ruler.py path/to/RULER   # a checkout of NVIDIA/RULER at c3f5e3b

Runs the checkout's `prepare.py` unmodified on a copy, with this project's data sources and with
tokenizers that the tests can build themselves. It needs `pip install tenacity` beside the test
requirements, and takes about 15 s per case. Cases already recorded are kept; `--again` redoes them.
Only hashes are stored, since the texts contain the essays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from eval import data  # noqa: E402
from eval.ruler import TASKS  # noqa: E402
from eval.ruler.essays import official_order  # noqa: E402
from tests.ruler_tokenizer import build, load_smollm2  # noqa: E402

GOLDEN = Path(__file__).with_name("ruler.json")
SAMPLES = 6
CASES = [
    *(("pieces", template, length) for template in ("base", "meta-llama3") for length in (4096, 8192)),
    *(("smollm2", "base", length) for length in (4096, 8192)),
]
ARGUMENTS = ("--tokenizer_type", "hf", "--benchmark", "synthetic", "--num_samples", str(SAMPLES))


def prepare(checkout: Path, folder: Path) -> dict[str, str]:
    """Lay out the official scripts with their data; returns the environment to run them in."""
    shutil.copytree(checkout / "scripts", folder / "scripts")
    files = folder / "scripts/data/synthetic/json"
    shutil.copy(data.resolve("ruler/squad"), files / "squad.json")
    shutil.copy(data.resolve("ruler/hotpotqa"), files / "hotpotqa.json")
    essays = official_order(json.loads(data.resolve("ruler/essays").read_text())["text"])
    (files / "PaulGrahamEssays.json").write_text(json.dumps({"text": essays}))
    words = files / "english_words.json"
    if words.read_text()[:7] == "version":  # a large-file pointer: cwe opens the file but needs it near 128K only
        words.write_text('{"0": "word"}')
    tokenizers = folder / "nltk/tokenizers"
    shutil.copytree(data.resolve("nltk/punkt_tab"), tokenizers / "punkt_tab")
    (tokenizers / "punkt").mkdir()  # its presence keeps prepare.py from downloading
    build().save_pretrained(folder / "pieces")
    load_smollm2().save_pretrained(folder / "smollm2")
    return {
        **os.environ,
        "NLTK_DATA": str(folder / "nltk"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def record(folder: Path, environment: dict[str, str], tokenizer: str, template: str, length: int, task: str) -> str:
    """Run one case; returns the hash of its prompts, answers and lengths."""
    out = folder / f"{tokenizer}-{template}-{length}"
    command = [sys.executable, str(folder / "scripts/data/prepare.py"), "--save_dir", str(out), "--task", task]
    command += ["--tokenizer_path", str(folder / tokenizer), "--model_template_type", template]
    command += ["--max_seq_length", str(length), *ARGUMENTS]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=1800)
    lines = (out / task / "validation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    content = [[row["input"] + row["answer_prefix"], row["outputs"], row["length"]] for row in rows]
    assert len(content) == SAMPLES
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def main() -> None:
    """Record every case that is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--again", action="store_true", help="record every case anew")
    arguments = parser.parse_args()
    hashes = {} if arguments.again or not GOLDEN.exists() else json.loads(GOLDEN.read_text())["hashes"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment = prepare(arguments.checkout, folder)
        for case in CASES:
            own = hashes.setdefault("/".join(map(str, case)), {})
            for task in TASKS:
                if task not in own:
                    own[task] = record(folder, environment, *case, task)
                    print(*case, task, own[task][:12], flush=True)
                    write(hashes)


def write(hashes: dict[str, dict[str, str]]) -> None:
    """Store the hashes with the versions that made them."""
    libraries = ("numpy", "scipy", "nltk", "wonderwords", "tokenizers", "transformers")
    made_with = {"ruler": "c3f5e3b", "python": platform.python_version(), **{name: version(name) for name in libraries}}
    content = {"samples": SAMPLES, "made_with": made_with, "hashes": hashes}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
