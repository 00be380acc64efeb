"""What `make release` checks before it builds, and the files around a release: workflows, container
files, the conda recipe. Linters that are not installed here (`pip install -e '.[release]'`) are
skipped."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests import needs
from tests.harness import LIMIT
from tests.tutorials.pages import blocks_of

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "deploy/containers/compose.yaml"


def _module() -> ModuleType:
    """scripts/ is no package."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASE = _module()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that have the version, with a dated changelog."""
    for name in RELEASE.VERSIONS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    log = tmp_path / "CHANGELOG.md"
    dated = re.sub(r"^(## \S+) \(.*\)$", r"\1 (2026-12-01)", log.read_text(), count=1, flags=re.M)
    log.write_text(dated)
    return tmp_path


def _version() -> str:
    text = (ROOT / "elasticrun/__init__.py").read_text()
    match = re.search(r'"([^"]+)"$', text, re.M)
    assert match is not None
    return match[1]


def test_the_version_is_the_same_everywhere() -> None:
    assert list(RELEASE.problems(ROOT, "", rehearse=True)) == []


def test_a_dated_tree_can_be_released(tree: Path) -> None:
    assert list(RELEASE.problems(tree, f"v{_version()}", rehearse=False)) == []


@pytest.mark.parametrize("name", RELEASE.VERSIONS)
def test_one_file_that_was_forgotten_stops_a_release(tree: Path, name: str) -> None:
    pattern = RELEASE.VERSIONS[name]
    text = (tree / name).read_text()
    match = re.search(pattern, text, re.M)
    assert match is not None
    (tree / name).write_text(text[: match.start(1)] + "9.9.9" + text[match.end(1) :])
    (sentence,) = RELEASE.problems(tree, "", rehearse=False)
    assert sentence.startswith("the version differs")
    assert f"9.9.9 in {name}" in sentence


def _undated(tree: Path) -> str:
    log = tree / "CHANGELOG.md"
    log.write_text(log.read_text().replace("(2026-12-01)", "(unreleased)"))
    return "CHANGELOG.md must begin with"


def _without_version(tree: Path) -> str:
    (tree / "CITATION.cff").write_text("cff-version: 1.2.0\n")
    return "CITATION.cff has no version"


@pytest.mark.parametrize("spoil", [_undated, _without_version])
def test_what_else_stops_a_release(tree: Path, spoil: Callable[[Path], str]) -> None:
    expected = spoil(tree)
    (sentence,) = RELEASE.problems(tree, "", rehearse=False)
    assert sentence.startswith(expected)


def test_another_tag_stops_a_release(tree: Path) -> None:
    (sentence,) = RELEASE.problems(tree, "v0.0.1", rehearse=False)
    assert sentence == f"the tag is v0.0.1, and the version is {_version()}"


def _run(*words: str) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr


SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.dependabot": ".github/dependabot.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.citation-file-format": "CITATION.cff",
    "vendor.compose-spec": "deploy/containers/compose.yaml",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_match_their_schema(schema: str) -> None:
    needs.packages("check_jsonschema")
    files = [str(path) for path in sorted(ROOT.glob(SCHEMAS[schema]))]
    assert files
    _run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files)


def _tool(name: str) -> str:
    """The path of a program of the extra `release`."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"not installed: {name} (pip install -e '.[release]')")
    return found


def test_workflows_are_not_open_to_attack() -> None:
    _run(_tool("zizmor"), "--offline", "--quiet", ".github")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_container_files_are_clean(name: str) -> None:
    _run(_tool("hadolint"), f"deploy/containers/{name}")


def test_the_dockerfile_of_the_tutorial_is_clean(tmp_path: Path) -> None:
    tutorial = ROOT / "docs/tutorials/gpu-image.md"
    (block,) = (block for block in blocks_of(tutorial) if block.path == "Dockerfile")
    path = tmp_path / "Dockerfile"
    path.write_text(block.text, encoding="utf-8")
    _run(_tool("hadolint"), str(path))


def test_a_wheel_can_be_built_from_what_the_image_copies() -> None:
    """Dockerfiles copy what .dockerignore lets through, and the build needs these."""
    copied = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    assert copied == {"elasticrun", "README.md", "LICENSE", "pyproject.toml"}


@pytest.mark.parametrize("service", ["node0", "node1"])
def test_the_launcher_takes_the_command_of_each_container(service: str) -> None:
    node = yaml.safe_load(COMPOSE.read_text())["services"][service]
    script = next(word for word in node["command"] if word.startswith("/examples/"))
    assert (ROOT / script.lstrip("/")).exists()
    _run(sys.executable, "-m", "elasticrun", "--dry-run", *node["command"])


CONDA = {"torch": "pytorch", "prometheus-client": "prometheus_client", "xxhash": "python-xxhash"}
"""Packages with another name on conda-forge."""


def test_the_conda_package_needs_what_the_wheel_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.sub(r"^[\w-]+", lambda name: CONDA.get(name[0], name[0]), one)
              for one in project["dependencies"]}  # fmt: skip
    run = yaml.safe_load((ROOT / "deploy/conda/recipe.yaml").read_text())["requirements"]["run"]
    ours = {one.replace(" ", "") for one in run if not one.startswith(("python ", "__"))}
    assert ours == needed
    floor = yaml.safe_load((ROOT / "deploy/conda/variants.yaml").read_text())["python_min"]
    assert [f">={one}" for one in floor] == [project["requires-python"]]
