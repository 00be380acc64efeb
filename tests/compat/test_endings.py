"""How a job ends: exit codes, error files, the summary."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.compat.pair import Case, Outcome, Pairs
from tests.further import cases, further

pytestmark = pytest.mark.slow

LOGS = "--log-dir={scratch}/logs"


def ends(*how: str, script: str = "ends.py", flags: tuple[str, ...] = (), ranks: int = 2) -> Case:
    """A script that ends as told, with its error files and the launcher's own."""
    return Case(
        (f"--nproc-per-node={ranks}", LOGS, *flags),
        (script, *how),
        {"TORCHELASTIC_ERROR_FILE": "{scratch}/launcher-error.json"},
        log_dir="logs",
    )


ENDINGS = {
    # name: (case, exit code of the launcher, the root cause's exit code in the summary)
    "all well": (ends("0"), 0, None),
    "seven": (ends("7", "1"), 1, "7"),
    "one of them well, one not": (ends("7", "1", "--peer-ends-well"), 1, "7"),
    "an early end": (ends("0", "1", "--peer-ends-well"), 0, None),
    "an exception": (ends("raise", "1"), 1, "1"),
    "a text": (ends("text", "0"), 1, "1"),
    "killed": (ends("signal:9", "1"), 1, "-9"),
    "segmentation fault": (ends("signal:11", "0"), 1, "-11"),
    "terminated itself": (ends("signal:15", "0"), 1, "-15"),
    "without a word": (ends("os_exit:5", "0"), 1, "5"),
    "recorded exception": (ends("raise", "1", script="recorded.py"), 1, "1"),
    "recorded exit": (ends("7", "1", script="recorded.py"), 1, "7"),
    "recorded chain": (ends("chained", "0", script="recorded.py"), 1, "1"),
    "one rank": (ends("7", ranks=1), 1, "7"),
    "budget spent": (ends("7", "1", flags=("--max-restarts=1",)), 1, "7"),
    "run path": (ends("raise", "0", flags=("--run-path",), ranks=1), 1, "1"),
    "run path, zero": (ends("0", "0", flags=("--run-path",), ranks=1), 0, None),
    "module": (
        Case(("-m",), ("ends", "7"), cwd="scripts"),
        1,
        "7",
    ),
    "no python": (Case(("--no-python",), ("false",)), 1, "1"),
    "no python, well": (Case(("--no-python",), ("true",)), 0, None),
}
KEPT = ("an exception", "recorded exception")
FAILING = cases([name for name, (_, code, _) in ENDINGS.items() if code], kept=KEPT)


def summary(outcome: Outcome) -> list[str]:
    """The summary's lines, from its upper border to its lower."""
    lines = outcome.stderr[0].splitlines()
    borders = [i for i, line in enumerate(lines) if re.fullmatch("=+", line)]
    assert len(borders) == 2, outcome.stderr[0]
    return lines[borders[0] : borders[1] + 1]


def root_cause(outcome: Outcome) -> dict[str, str]:
    """The labels of the root cause with their values."""
    lines = summary(outcome)
    start = lines.index("Root Cause (first observed failure):")
    found = (re.match(r"  (\w+) *: (.*)$", line) for line in lines[start:])
    return {match[1]: match[2] for match in list(filter(None, found))[:6]}


@pytest.mark.parametrize("name", cases(ENDINGS, kept=KEPT))
def test_the_exit_code(pairs: Pairs, name: str) -> None:
    case, code, _ = ENDINGS[name]
    theirs, ours = pairs(case)
    assert (theirs.code, ours.code) == (code, code), ours.stderr[0]


@pytest.mark.parametrize("name", FAILING)
def test_the_root_cause(pairs: Pairs, name: str) -> None:
    case, _, exitcode = ENDINGS[name]
    assert exitcode is not None
    theirs, ours = (root_cause(outcome) for outcome in pairs(case))
    assert (
        list(ours)
        == list(theirs)
        == [*("time", "host", "rank", "exitcode", "error_file", "traceback")]
    )
    for cause in (theirs, ours):
        assert cause["exitcode"].split()[0] == exitcode
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d(\.\d+)?", cause["time"])
        assert re.fullmatch(r"\d+ \(local_rank: \d+\)", cause["rank"])
        assert re.match(r"-?\d+ \(pid: \d+\) ", cause["exitcode"] + " ")
    assert ours["rank"] == theirs["rank"]
    assert ours["host"] == theirs["host"]


def shape(outcome: Outcome) -> list[str]:
    """The summary's headings; what differs from run to run is left out."""
    kept = []
    for line in summary(outcome):
        if re.fullmatch(r"=+|-+", line):
            kept.append(line[0])
        elif line.endswith(" FAILED"):
            kept.append(line.split("/")[-1])
        elif re.fullmatch(r"\[\d+\]:", line):
            kept.append("[index]:")
        elif re.fullmatch(r"\S.*:|  <NO_OTHER_FAILURES>", line):
            kept.append(line.strip())
    return kept


@pytest.mark.parametrize("name", FAILING)
def test_the_shape_of_the_summary(pairs: Pairs, name: str) -> None:
    """The same headings in the same order, borders by the same rule.

    Deliberate difference: torchrun lists the survivors that it terminated itself as failures too;
    here they are none. And under --run-path it calls the script `run_script_path`."""
    theirs, ours = pairs(ENDINGS[name][0])
    before, after = shape(theirs), shape(ours)
    lines = summary(theirs)
    others = lines[: lines.index("Root Cause (first observed failure):")]
    if any(re.search("exitcode +: -15 .*SIGTERM", line) for line in others):
        start = before.index("Failures:") + 1
        assert before[start] == "[index]:"
        before[start] = "<NO_OTHER_FAILURES>"
    if name == "run path":
        assert before[1] == "run_script_path FAILED"
        before[1] = "ends.py FAILED"
    assert after == before
    for outcome in (theirs, ours):
        lines = summary(outcome)
        assert len(lines[0]) == min(60, max(len(line) for line in lines))


def test_the_traceback_of_a_signal(pairs: Pairs) -> None:
    for outcome in pairs(ENDINGS["killed"][0]):
        cause = root_cause(outcome)
        assert re.fullmatch(r"Signal 9 \(SIGKILL\) received by PID \d+", cause["traceback"])
        assert cause["exitcode"].endswith("(SIGKILL)")
        assert cause["error_file"] == "<N/A>"


def error_files(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """error.json by path in the log tree, the launcher's own copy as `launcher`."""
    files = {n: json.loads(t) for n, t in outcome.tree.items() if n.endswith("error.json") and t}
    copy = outcome.scratch / "launcher-error.json"
    return {**files, **({"launcher": json.loads(copy.read_text())} if copy.exists() else {})}


@pytest.mark.parametrize(
    "name", cases(["recorded exception", "recorded chain"], kept=["recorded exception"])
)
def test_the_error_file_of_a_recorded_script(pairs: Pairs, name: str) -> None:
    """Written by torch's @record in the rank, copied with the exit code for who asked for it."""
    theirs, ours = (error_files(outcome) for outcome in pairs(ENDINGS[name][0]))
    assert ours.keys() == theirs.keys()
    for file, content in theirs.items():
        before, after = content["message"], ours[file]["message"]
        assert after.keys() == before.keys()
        assert after["message"] == before["message"]
        assert after.get("errorCode") == before.get("errorCode")
        assert re.fullmatch(r"\d{10}", after["extraInfo"]["timestamp"])
        assert after["extraInfo"]["py_callstack"].splitlines()[-1] == before["message"]


@pytest.mark.parametrize(
    "name", cases(["recorded exit", "seven", "killed", "all well", "text"], kept=["killed"])
)
def test_no_error_file_for_what_is_no_exception(pairs: Pairs, name: str) -> None:
    case = ENDINGS["a text" if name == "text" else name][0]
    theirs, ours = (error_files(outcome) for outcome in pairs(case))
    assert ours.keys() == theirs.keys() == set()


def test_an_exception_without_record_is_named(pairs: Pairs) -> None:
    """Deliberate difference: torchrun writes no error file and its summary tells the user to read
    a page; here the excepthook of a rank writes one, and the summary shows the exception."""
    theirs, ours = pairs(ENDINGS["an exception"][0])
    assert not error_files(theirs)
    assert root_cause(theirs)["traceback"].startswith("To enable traceback see")
    (message,) = {str(f["message"]["message"]) for f in error_files(ours).values()}
    assert message == "ValueError: boom"
    assert "boom" in "\n".join(summary(ours))


def test_the_user_sees_the_traceback_once(pairs: Pairs) -> None:
    """The rank's own traceback on the console is what plain python prints; none of our frames."""
    theirs, ours = pairs(ENDINGS["an exception"][0])

    def own(outcome: Outcome) -> list[str]:
        text = outcome.stderr[0]
        start = text.index("Traceback (most recent call last)")
        return text[start : text.index("ValueError: boom", start)].splitlines()

    assert own(ours) == own(theirs)


def test_lines_that_users_grep_for(pairs: Pairs) -> None:
    for outcome in pairs(ENDINGS["killed"][0]):
        assert re.search(
            r"failed \(exitcode: -9\) local_rank: 1 \(pid: \d+\) of binary: ", outcome.stderr[0]
        ), outcome.launcher


BAD = {
    # what torch's parser refuses is compared in test_flags, and here in two examples
    # name: (flags, program, exit code of torchrun; ours is always 2)
    "unknown flag": (("--no-such-flag",), ("dump.py",), 2),
    "no script": ((), (), 2),
    "nproc": (("--nproc-per-node=several",), ("dump.py",), 1),
    "three node counts": (("--nnodes=1:2:3",), ("dump.py",), 1),
    "fewer than none": (("--nnodes=2:1",), ("dump.py",), 1),
    "module without python": (("-m", "--no-python"), ("dump",), 1),
    "a conf without a value": (("--rdzv-conf=join_timeout",), ("dump.py",), 1),
    "a redirect": (("-r", "9"), ("dump.py",), 1),
    "a variable": (("--nnodes=1",), ("dump.py",), 2),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_sentence(pairs: Pairs, name: str) -> None:
    """Where torchrun answers with a traceback and 1, ours is one sentence and 2."""
    flags, program, code = BAD[name]
    env = {"PET_MAX_RESTARTS": "several"} if name == "a variable" else {}
    theirs, ours = pairs(Case(flags, program or ("--role=x",), env))
    assert (theirs.code, ours.code) == (code, 2), (theirs.stderr[0][-300:], ours.stderr)
    assert ("Traceback" in theirs.stderr[0]) == (code == 1)
    assert "Traceback" not in ours.stderr[0]
    assert "error: " in ours.stderr[0]


MISSING = {
    "script": ((), ("no/such/script.py",)),
    "module": (("-m",), ("no_such_module_at_all",)),
    "program": (("--no-python",), ("./no-such-program",)),
    "run path": (("--run-path",), ("no/such/script.py",)),
}


@pytest.mark.parametrize("what", cases(MISSING, soaked=["run path", "module"]))
def test_a_program_that_is_missing(pairs: Pairs, what: str) -> None:
    """torchrun ends with 1, because a rank fails. Here the launcher looks first, except for a
    module, whose search may import its packages: the command line is wrong. No traceback is the
    launcher's."""
    flags, program = MISSING[what]
    theirs, ours = pairs(Case(flags, program))
    assert theirs.code == 1
    assert ours.code == (1 if what == "module" else 2), ours.stderr[0]
    name = program[0].split("/")[-1]
    assert name in ours.stderr[0]
    assert "elasticrun/" not in "".join(re.findall(r'File "[^"]*"', ours.stderr[0]))


@further("compat/test_output::test_the_run_folder_is_named_by_the_run")
def test_the_users_run_id_is_kept(pairs: Pairs) -> None:
    """Defect (R:1009): on one node torchrun throws `--rdzv-id` away."""
    theirs, ours = pairs(Case(("--standalone", "--rdzv-id=mine")))
    assert theirs.dumps[0, 0]["environ"]["TORCHELASTIC_RUN_ID"] != "mine"
    assert ours.dumps[0, 0]["environ"]["TORCHELASTIC_RUN_ID"] == "mine"
