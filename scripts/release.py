"""Everything of a release but the upload: `make release` (CONTRIBUTING.md).

    python scripts/release.py [--rehearse] [--tag vX.Y.Z]

The version must be the same wherever it stands, and the changelog must have its date. The packages
are built twice from the commit, in different folders, with the same result, and are left in dist/.
`--rehearse` accepts an unreleased version and uncommitted files, which it does not build.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

VERSIONS: Final = {
    "elasticrun/__init__.py": r'^__version__ = "([^"]+)"$',
    "CHANGELOG.md": r"^## (\S+) \(",
    "CITATION.cff": r"^version: (\S+)$",
    "charts/elasticrun-operator/Chart.yaml": r"^appVersion: (\S+)$",
    "deploy/conda/recipe.yaml": r'^  version: "([^"]+)"$',
}
"""Each file that has the version, and where: the first match counts."""

DATED: Final = r"^## \S+ \((\d{4}-\d\d-\d\d)\)$"


def problems(root: Path, tag: str, *, rehearse: bool) -> Iterator[str]:
    """What is inconsistent, one sentence each. `tag`: the git tag of the release, "" if unknown."""
    found = {}
    for name, pattern in VERSIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        match = re.search(pattern, text, re.M)
        if match is None:
            yield f"{name} has no version"
            continue
        found[name] = match[1]
    if len(set(found.values())) > 1:
        each = ", ".join(f"{version} in {name}" for name, version in found.items())
        yield f"the version differs: {each}"
    version = found.get("elasticrun/__init__.py", "")
    if tag and tag != f"v{version}":
        yield f"the tag is {tag}, and the version is {version}"
    first = re.search(r"^## .*$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    if not rehearse and (first is None or not re.fullmatch(DATED, first[0])):
        yield f"CHANGELOG.md must begin with `## {version} (YYYY-MM-DD)`, the day of the release"


def uncommitted() -> list[str]:
    """Files that differ from the commit."""
    return _output("git", "status", "--porcelain").splitlines()


def build(into: Path, epoch: str) -> dict[str, str]:
    """Build both packages from the commit in a new folder. Returns their hashes by name."""
    with tempfile.TemporaryDirectory(prefix="elasticrun-release-") as folder:
        source = Path(folder) / "source"
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True,
                                 stdout=subprocess.PIPE).stdout  # fmt: skip
        subprocess.run(["tar", "x"], cwd=source, input=archive, check=True)
        # the wheel is built from the sdist, so the sdist has all that a build needs
        _run("build", "--outdir", str(into), str(source), epoch=epoch)
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(into.iterdir())
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="release.py")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--tag", default="")
    asked = parser.parse_args(argv)
    wrong = list(problems(ROOT, asked.tag, rehearse=asked.rehearse))
    if not asked.rehearse and (files := uncommitted()):
        wrong.append(f"commit these first: {', '.join(line[3:] for line in files[:5])}")
    if wrong:
        print("\n".join(f"release: {sentence}" for sentence in wrong), file=sys.stderr)
        return 1
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    epoch = _output("git", "log", "-1", "--format=%ct")
    hashes = build(dist, epoch)
    with tempfile.TemporaryDirectory(prefix="elasticrun-release-") as again:
        if (second := build(Path(again), epoch)) != hashes:
            print(f"release: two builds differ: {hashes} and {second}", file=sys.stderr)
            return 1
    (wheel,) = dist.glob("*.whl")
    _run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    _run("check_wheel_contents", str(wheel))
    environ = os.environ | {"PYTHON": sys.executable, "WHEEL": str(wheel)}
    test = ["bash", str(ROOT / "scripts/wheel_test.sh"), "pip", "uv", "pipx"]
    subprocess.run(test, env=environ, check=True)
    for name, digest in hashes.items():
        print(f"{digest}  dist/{name}")
    print("release: both packages are reproducible and checked; nothing was uploaded")
    return 0


def _run(module: str, *words: str, epoch: str = "") -> None:
    environ = os.environ | ({"SOURCE_DATE_EPOCH": epoch} if epoch else {})
    subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, env=environ, check=True)


def _output(*words: str) -> str:
    return subprocess.run(
        words, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as failed:
        sys.exit(f"release: {failed}")
