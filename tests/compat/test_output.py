"""Where the output of ranks goes: console, prefix, filters, and the tree of log files."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.compat.pair import Case, Outcome, Pairs
from tests.further import cases, further

pytestmark = pytest.mark.slow

LOGS = "--log-dir={scratch}/logs"


def chatty(*flags: str, ranks: int = 2, log_dir: str = "logs", **env: str) -> Case:
    """chatty.py on some ranks, its log tree under the scratch folder."""
    more = () if log_dir != "logs" else (LOGS,)
    return Case((f"--nproc-per-node={ranks}", *more, *flags), ("chatty.py",), env, log_dir=log_dir)


CASES = {
    "neither": chatty(),
    "no folder named": chatty("-r3", log_dir="tmp"),
    "no files at all": Case(
        ("--nproc-per-node=2", "--log-dir=/dev/null"), ("chatty.py",), log_dir="tmp"
    ),
    "redirect both": chatty("--redirects=3"),
    "tee both": chatty("--tee", "3"),
    "tee over redirect": chatty("-r", "1", "-t", "2"),
    "by rank": chatty("-r", "0:1,1:2"),
    "tee one rank": chatty("-t", "0:3"),
    "filter ranks, plain": chatty("--local-ranks-filter=1"),
    "filter ranks, tee": chatty("-t3", "--local_ranks_filter", "0"),
    "filter ranks, redirect": chatty("-r1", "--local-ranks-filter", "0"),
    "needles": chatty("-t3", "--duplicate-stdout-filters=needle,nothing"),
    "needles in both": chatty(
        "-t3", "--duplicate-stdout-filters=a,, comma", "--duplicate-stderr-filters=needle,raw"
    ),
    "needles without tee": chatty("-r3", "--duplicate-stdout-filters=needle"),
    "role in the prefix": chatty("-t3", "--role=trainer"),
    "prefix template": chatty(
        "-t3",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name}|${rank}|${local_rank}> ",
    ),
    "every life": chatty("-t3", "--max-restarts=1", CHATTY_FAIL_UNTIL="1"),
    "standalone": chatty("--standalone", "-t3"),
    "run id": Case(
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=mine", LOGS, "-t3"),
        ("chatty.py",),
        log_dir="logs",
    ),
}

KEPT = ("every life", "run id")


def said(text: str) -> Counter[str]:
    """The lines of ranks on a console: order between ranks is not kept, so they are counted.

    A line without an end runs into whatever comes next, so it is cut off where it stands."""
    text = re.sub(r"(no newline at the end \d)", r"\1\n", text)
    kept = re.compile(
        r"^(\[[^\]]*\]:|<[^>]*> )?((out|err) rank|raw|needle|a, comma|grün|no newline at the end)"
    )
    return Counter(line for line in text.splitlines() if kept.match(line))


@pytest.mark.parametrize("name", cases(CASES, kept=KEPT))
def test_the_console_shows_the_same(pairs: Pairs, name: str) -> None:
    theirs, ours = pairs(CASES[name])
    assert theirs.codes == ours.codes == [0], ours.stderr
    assert said(ours.stdout[0]) == said(theirs.stdout[0])
    assert said(ours.stderr[0]) == said(theirs.stderr[0])


def wanted_files(outcome: Outcome) -> dict[str, str | Counter[str]]:
    """The log tree; filtered files hold the lines of several ranks in no order. What a script
    leaves in $TMPDIR beside the logs is not part of it."""
    return {
        name: said(text) if "filtered" in name else text
        for name, text in outcome.tree.items()
        if "/attempt_" in name
    }


@pytest.mark.parametrize("name", cases(CASES, kept=KEPT))
def test_the_log_tree_is_the_same(pairs: Pairs, name: str) -> None:
    theirs, ours = pairs(CASES[name])
    expected, got = wanted_files(theirs), wanted_files(ours)
    assert got.keys() == expected.keys()
    assert got == expected


def test_the_run_folder_is_named_by_the_run(pairs: Pairs) -> None:
    """`<run id>_<8 characters>`."""
    for outcome in pairs(CASES["run id"]):
        (folder,) = (outcome.scratch / "logs").iterdir()
        assert re.fullmatch(r"mine_[a-z0-9_]{8}", folder.name)


def test_a_file_in_the_place_of_the_log_folder(pairs: Pairs) -> None:
    """Both refuse; ours in a sentence."""
    case = Case(("--log-dir=/etc/hostname",), ("chatty.py",))
    theirs, ours = pairs(case)
    assert theirs.code == 1
    assert ours.code not in (0, -6)
    assert "/etc/hostname" in ours.stderr[0]
    assert "Traceback" not in ours.stderr[0]


@further("cli/test_resolve", "test_the_log_tree_is_the_same")
def test_ranks_of_several_digits(pairs: Pairs) -> None:
    """Defect (M:116): torchrun refuses `-r 12:1`; here it means local rank 12."""
    case = Case(("--nproc-per-node=13", LOGS, "-r", "12:1"), ("chatty.py",), log_dir="logs")
    theirs, ours = pairs(case)
    assert theirs.code == 1
    assert ours.code == 0, ours.stderr
    assert [name for name in ours.tree if name.endswith("stdout.log")] == [
        "RUN/attempt_0/12/stdout.log"
    ]


@further("test_the_log_tree_is_the_same", "agent/logs/test_logs", "cli/test_resolve")
def test_prefix_template_flag_of_2_14(pairs: Pairs) -> None:
    """`--log-line-prefix-template` beats the variable, knows ${hostname}; 2.13 lacks it."""
    case = chatty(
        "-t1",
        "--log-line-prefix-template=<${hostname}/${rank}>",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<no> ",
    )
    theirs, ours = pairs(case)
    from torch.distributed.run import get_args_parser

    known = any(one.dest == "log_line_prefix_template" for one in get_args_parser()._actions)
    assert theirs.code == (0 if known else 2)
    assert ours.code == 0, ours.stderr
    for outcome in (theirs, ours) if known else (ours,):
        assert re.search(r"^<[^>$]+/1>needle out 1$", outcome.stdout[0], re.M)
