"""What is named is there: documents that files cite; and in pages other pages and their headings,
tests, flags and their defaults."""

from __future__ import annotations

import re
from pathlib import Path

from elasticrun.cli import resolve
from elasticrun.cli.main import VERBS
from elasticrun.cli.table import FLAGS, OURS
from elasticrun.core.rounds.failures import CONTRACT

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```.*?^```", re.M | re.S)

ROOMS = ("elasticrun", "tests", "docs", "benchmarks", "examples", "protos", "scripts", ".ci")
SPOKEN = ("*.py", "*.pyi", "*.proto", "*.md", "*.txt", "*.sh", "*.toml", "Makefile", "run")
CITED = re.compile(
    r"(?<![\w-])(?P<page>[\w-]+\.md)\b"
    r"|\b[Dd]ecisions? (?P<decision>\d+)"
    r"|\b(?:COORDINATIO[N]|DROP-I[N]|DESIG[N]|HOUS[E])\b|\b[Ll]aws?\s+\d+"  # of other places
)
LIKELY = re.compile(r"\.md|ecisions? \d|COORDINATIO[N]|DROP-I[N]|DESIG[N]|HOUS[E]|aws?\s+\d")
"""In whatever has something that is `CITED`; five times as fast."""


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def headings(page: Path) -> set[str]:
    """What a link may name behind `#`."""
    found = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if link.startswith("https://"):
                continue
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists():
                wrong.append(f"{page.relative_to(ROOT)}: there is no {link}")
            elif heading and heading not in headings(target):
                wrong.append(f"{page.relative_to(ROOT)}: {name or page.name} has no #{heading}")
    assert not wrong, "\n".join(wrong)


def test_no_file_cites_a_document_that_is_not_there() -> None:
    """Who reads a comment has this repository and nothing else."""
    files = {path for pattern in SPOKEN for path in ROOT.glob(pattern)}
    files |= {path for room in ROOMS for pattern in SPOKEN for path in (ROOT / room).rglob(pattern)}
    there = {path.name for path in files}
    there |= {path.name[:3] for path in (ROOT / "docs/decisions").iterdir()}
    there |= {"0001.md", "0007.md"}  # of incidents
    there |= {"report.md", "texts.md"}  # written by the check on a GPU
    wrong = []
    for path in sorted(files):
        text = path.read_text(encoding="utf-8")
        for found in CITED.finditer(text) if LIKELY.search(text) else ():
            if (found["page"] or found["decision"]) not in there:
                line = text.count("\n", 0, found.start()) + 1
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {' '.join(found[0].split())}")
    what = "This is not in the repository. Write the reason itself, or the decision that gives it:"
    assert len(files) > 500
    assert not wrong, "\n".join([what, *wrong])


def test_the_architecture_names_what_is_there() -> None:
    """Every file and folder that it names exists, and it names every folder."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    named = set(re.findall(r"`([\w./]+(?:\.py|\.proto|\.md|/))`", text))
    places = (ROOT, ROOT / "elasticrun")
    assert not [name for name in named if not any((place / name).exists() for place in places)]
    built = {path.parent for path in (ROOT / "elasticrun").rglob("__init__.py")}
    folders = {f"{path.relative_to(ROOT / 'elasticrun')}/" for path in built}
    parts = {
        "./",
        "wire/pb/",
        "wire/rpc/",
        "cli/verbs/",
        "jobs/kube/",
        "forkserver/warm/",
    }  # in their folder's line
    assert not folders - named - parts


def test_what_is_to_be_touched_has_the_names_of_its_row() -> None:
    """In the list of what to touch for an addition: a name is in a file or folder of its row."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = [
        row for row in text.split("## To add")[1].split("## ")[0].splitlines() if row[:1] == "|"
    ]
    wrong = []
    for row in rows[2:]:
        words = re.findall(r"`([^`]+)`", row.split("|", 2)[2])
        paths = [
            base / word for word in words if "/" in word for base in (ROOT, ROOT / "elasticrun")
        ]
        paths += [ROOT / "elasticrun" / word for word in words if re.fullmatch(r"\w+\.py", word)]
        files = [one for path in paths for one in (path, *path.glob("*.py")) if one.is_file()]
        code = "".join(file.read_text(encoding="utf-8") for file in files)
        names = [word.split(".")[-1] for word in words if re.fullmatch(r"\w+(\.\w+)?", word)]
        missing = [name for name in names if not re.search(rf"\b{name}", code) and name != "py"]
        wrong += [f"{row.split('|')[1].strip()}: {name}" for name in missing]
    assert len(rows) > 15
    assert not wrong, "\n".join(wrong)


def test_each_row_of_what_survives_what_has_tests() -> None:
    """`FILE: TEST`; a name alone is of a file that stands before it, or is one."""
    folders = [ROOT / "tests", ROOT / "tests/faults", ROOT / "tests/health"]
    known = {path.stem: path for folder in folders[1:] for path in folder.glob("test_*.py")}
    anywhere = "".join(path.read_text() for path in known.values())
    listed = dict(rows(ROOT / "tests/faults/README.md"))
    faults = [first for first, _ in rows(ROOT / "docs/what-survives.md")]
    assert {*faults} == {*listed}
    named = [re.findall(r"`(?:([\w/]+): )?(test_\w+)[^`]*`", tests) for tests in listed.values()]
    assert sum(map(bool, named)) > 50
    for file, name in (one for found in named for one in found):
        paths = [folder / f"{file}.py" for folder in folders if (folder / f"{file}.py").exists()]
        source = paths[0].read_text() if paths else "" if file else anywhere
        assert name in known or f"def {name}(" in source, f"{file or 'no file'} has no {name}"


def rows(page: Path) -> list[tuple[str, str]]:
    """The first and the last cell of each row of its tables, without links."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", prose(page))
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line[:2] == "| "]
    heads = {"fault", "event", "row"}
    return [(cells[0], cells[-1]) for cells in lines if cells[0] not in heads]


def test_the_page_of_flags_has_each_of_ours_with_its_default() -> None:
    table = prose(ROOT / "docs/flags.md").replace("\\|", "/")
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `--")]
    told = {name: default for names, default in rows for name in re.findall(r"--[\w-]+", names)}
    flags = {flag.name: flag for flag in FLAGS}
    assert {name for name, flag in flags.items() if flag.origin == OURS} - {"--version"} <= {*told}
    numbers = {name: re.findall(r"[\d.]+", default) for name, default in told.items()}
    for name in (name for name in numbers if isinstance(flags[name].default, int | float)):
        assert [float(word) for word in numbers[name]] in ([flags[name].default], []), name


def test_each_verb_is_on_a_page() -> None:
    pages = "".join(prose(page) for page in (ROOT / "docs").glob("*.md"))
    assert not [verb for verb in VERBS if not re.search(rf"`(elasticrun )?{verb}\b", pages)]


def test_the_page_of_flags_has_each_key_of_the_rendezvous_with_its_default() -> None:
    table = prose(ROOT / "docs/flags.md").split("## Keys of")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| ([\d.]*) \|", table, re.M))
    times = {**resolve._TIMES, **resolve._HEALTH_TIMES}
    assert {name: float(told[name]) for name in times} == times
    assert {*told} - {*times} <= {*resolve._OTHER_KEYS}


def test_the_page_of_exit_codes_has_each_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ", prose(ROOT / "docs/exit-codes.md"), re.M)
    assert {int(code) for code in rows} == {clause.code for clause in CONTRACT.values()}


def test_the_page_of_events_has_each_kind() -> None:
    sent = (ROOT / "elasticrun/master/outward/outward.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r'_notifier\.put\("(\w+)"', sent))
    page = (ROOT / "docs/sight.md").read_text(encoding="utf-8")
    assert len(kinds) > 3
    assert kinds == set(re.findall(r'^\{"event": "(\w+)"', page, re.M))


def test_the_page_of_the_api_describes_each_entry_that_the_site_adds() -> None:
    """A forge does not show those entries: there the tables are all that is read."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    added = re.findall(r"^<!-- api: (\S+) -->$", page, re.M)
    described = [line for line in page.splitlines() if line.startswith("| ")]
    for name in added:
        path = ROOT / f"{name.replace('.', '/')}.py"
        last = name.rpartition(".")[2]
        if not path.is_file():
            path = ROOT / f"{name.rpartition('.')[0].replace('.', '/')}.py"
            assert re.search(rf"^(class|def) {last}\b", path.read_text(), re.M), name
        link = f"](../{path.relative_to(ROOT)})"
        assert any(link in line and re.search(rf"\b{last}\b", line) for line in described), name
    assert len(added) >= 14
    assert ":::" not in page


def test_each_page_has_its_place_in_the_navigation_of_the_site() -> None:
    """`make docs` looks too; this costs nothing. The decisions are listed by the site itself."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [^:]+: ([\w/-]+\.md)$", text, re.M)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(page for page in pages if not page.startswith("decisions/"))


def test_the_readme_is_short_and_begins_with_a_job_that_survives_a_kill() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 140
    install, first = (block.splitlines()[1] for block in BLOCK.findall(text)[:2])
    assert install == "$ pip install ."
    assert first.startswith("$ elasticrun ")
    assert "--max-restarts=" in first
    for word in ("rendezvous", "node failure", "preemption", "hang"):
        assert word in text.lower(), f"nobody who searches for {word!r} finds this page"


def test_tests_that_pages_name_are_there() -> None:
    """`folder/test_file::test_name` in a page, below tests/."""
    wrong = []
    for page in PAGES:
        for file, name in re.findall(
            r"`([a-z]+(?:/[a-z]+)*/test_\w+)(?:::(test_\w+))?`", prose(page)
        ):
            path = ROOT / "tests" / f"{file}.py"
            if not path.exists() or (name and f"def {name}(" not in path.read_text()):
                wrong.append(f"{page.relative_to(ROOT)}: there is no {file}::{name}")
    assert not wrong, "\n".join(wrong)
