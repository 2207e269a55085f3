"""The documents' promises: commands, the example, the toy method, and what the wheel holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.ruler_tokenizer import build
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parent.parent


def block(document: str, marker: str) -> str:
    """Contents of the code block after a marker comment."""
    text = (ROOT / document).read_text()
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    assert found, f"{document} has no block marked {marker}"
    return found.group(1)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    build().save_pretrained(folder)
    return folder


def test_the_readme_example_runs(model_folder, capsys, monkeypatch):
    example = block("README.md", "example").replace('"smollm2_135m"', f"path={str(model_folder)!r}")
    assert str(model_folder) in example
    assert len(example.strip().splitlines()) <= 12
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert f"{19 * 2} sparse + 0 dense of {19 * 2} decode layer-steps" in said  # 20 tokens, two layers
    assert float(re.search(r"^sparsity (\S+)", said, flags=re.MULTILINE).group(1)) > 0


@pytest.mark.parametrize("marker", ["command: main", "command: test"])
def test_set_up_commands_are_one_line(marker):
    command = block("README.md", marker)
    assert len(command.splitlines()) == 1
    assert command.startswith("python3 -m venv .venv && ")


def test_a_toy_method_from_outside_runs_as_contributing_says(model_folder, tmp_path):
    (tmp_path / "my_module.py").write_text(block("CONTRIBUTING.md", "toy method"))
    conf = tmp_path / "my_conf" / "method"
    conf.mkdir(parents=True)
    knobs = block("CONTRIBUTING.md", "toy yaml").replace("name: stride", "name: my_module:Stride")
    (conf / "stride.yaml").write_text(knobs)
    arguments = [
        f"hydra.searchpath=[file://{tmp_path}/my_conf]",
        "method=stride",
        f"model.path={model_folder}",
        "task.length=512",
        "task.tasks=[niah_single_1]",
        "task.samples=1",
        "tracker=none",
        f"out={tmp_path}/out",
    ]
    environment = {"PYTHONPATH": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "status complete" in done.stdout
    assert re.search(r"kept 0\.[23]", done.stdout)  # a quarter of the tokens and the sinks


def test_the_toy_method_equals_dense_when_it_keeps_everything(tmp_path, monkeypatch):
    from ffd.methods import LayerGeometry, RowState, create

    (tmp_path / "toy_equal.py").write_text(block("CONTRIBUTING.md", "toy method"))
    monkeypatch.syspath_prepend(tmp_path)
    geometry = LayerGeometry(1, 4, 2, 16, 40, torch.float32, torch.device("cpu"))
    outputs = []
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 4, 16)
    for name, knobs in (("dense", {}), ("toy_equal:Stride", {"every": 1}), ("toy_equal:Stride", {"every": 3})):
        rows = RowState.allocate(1, "cpu")
        rows.lengths.fill_(30)
        layer = create(name, knobs).new_layer(geometry, rows, "reference")
        layer.prefill(k, v)
        outputs.append(layer.decode(q, 0.25))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def copy_to(source: Path) -> Path:
    """A copy to build from: setuptools leaves a build folder whose stale files a later wheel would hold."""
    shutil.copytree(ROOT / "ffd", source / "ffd", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def test_the_wheel_holds_ffd_alone(tmp_path):
    source = copy_to(tmp_path / "source")
    for other in ("eval", "experiments", "analysis"):
        (source / other).mkdir()
        (source / other / "__init__.py").touch()
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("ffd-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {n.split("/")[0] for n in names}
    assert packages == {"ffd", next(p for p in packages if p.endswith(".dist-info"))}
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "ffd").rglob("*.py")}
    assert {n for n in names if n.startswith("ffd/")} == expected


def test_a_checkout_beside_a_script_does_not_hide_the_installed_package(tmp_path):
    # A script beside the checkout has a folder named ffd on its path, which as a namespace package once came first.
    source = copy_to(tmp_path / "ffd")
    build = f"import setuptools.build_meta as b; b.build_editable({str(tmp_path)!r})"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("ffd-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    find = f"""
import importlib.util, site, sys
sys.path.insert(0, {str(tmp_path)!r})
site.addsitedir({str(tmp_path / "site")!r})
print(importlib.util.find_spec("ffd").origin)
"""
    found = subprocess.run([sys.executable, "-I", "-S", "-c", find], capture_output=True, text=True)
    assert found.stdout.strip() == str(source / "ffd" / "__init__.py"), found.stderr


def test_ffd_imports_nothing_of_the_harness():
    forbidden = re.compile(
        r"^\s*(?:import|from)\s+(hydra|omegaconf|wandb|datasets|pandas|lm_eval|eval|experiments|analysis)\b",
        re.MULTILINE,
    )
    offenders = [str(p) for p in (ROOT / "ffd").rglob("*.py") if forbidden.search(p.read_text())]
    assert offenders == []


def test_every_method_has_a_card_and_a_configuration_with_its_defaults():
    import yaml

    from ffd.methods import create, method_names

    for name in method_names():
        assert (ROOT / "docs" / "methods" / f"{name}.md").exists(), name
        knobs = yaml.safe_load((ROOT / "conf" / "method" / f"{name}.yaml").read_text())
        assert knobs.pop("name") == name
        assert create(name, knobs).knobs() == create(name).knobs() == {**create(name).knobs(), **knobs}
        assert set(knobs) == set(create(name).knobs()), name
