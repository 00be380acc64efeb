"""The proof of the token, as two machines that talk to each other, and everybody in between."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs

from elasticrun.wire import auth, messages as m
from tests.further import examples
from tests.wire import strategies as draw
from tests.wire.test_codec import HELLO

TOKEN = "open sesame"
JOB, NODE, LIFE = HELLO.spec.job_id, HELLO.node, HELLO.incarnation


def guest(token: str = TOKEN, role: m.Role = m.Role.AGENT, **changes: str) -> auth.AuthClient:
    said = {"job_id": JOB, "node": NODE, "incarnation": LIFE, **changes}
    return auth.AuthClient(token, "1", role, **(said if role is m.Role.AGENT else {}))


def keeper(token: str = TOKEN, role: m.Role = m.Role.AGENT, term: int = 7) -> auth.AuthServer:
    return auth.AuthServer(token, "1", JOB, term, role)


def knock(at: auth.AuthServer, who: auth.AuthClient) -> m.Challenge:
    """The challenge to a knock."""
    challenge = at.receive(who.knock)
    assert challenge is not None
    return challenge


@pytest.mark.parametrize("token", ["", TOKEN, "ü" * 4096], ids=["none", "short", "long"])
def test_an_agent_comes_in(token: str) -> None:
    who, door = guest(token), keeper(token)
    assert door.receive(who.answer(knock(door, who))) is None
    assert not door.is_authenticated
    assert door.receive(HELLO) is None
    assert door.is_authenticated
    assert door.hello is HELLO


def test_a_reader_comes_in_with_what_was_made_for_readers() -> None:
    who = auth.AuthClient(auth.reader_token(TOKEN), "1")
    door = keeper(role=m.Role.READER)
    assert door.receive(who.answer(knock(door, who))) is None
    assert door.is_authenticated


def test_what_was_made_for_readers_lets_no_agent_in_and_does_not_give_the_token_away() -> None:
    made = auth.reader_token(TOKEN)
    assert auth.reader_token(made) != made != TOKEN
    assert auth.reader_token("") == ""
    door = keeper()
    who = guest(made)
    challenge = knock(door, who)
    with pytest.raises(auth.Denied, match="does not know this job's token"):
        who.answer(challenge)
    with pytest.raises(auth.OutOfTurn, match="role reader"):
        keeper().receive(auth.AuthClient(made, "1").knock)
    with pytest.raises(auth.OutOfTurn, match="role agent"):
        keeper(role=m.Role.READER).receive(guest().knock)


# ---------------------------------------------------------------- the table: who has a token


def test_the_token_is_wanted_of_who_has_none() -> None:
    with pytest.raises(auth.Denied, match="set ELASTICRUN_TOKEN or --token-file"):
        keeper().receive(guest("").knock)


def test_who_has_a_token_follows_no_master_without() -> None:
    door = keeper("")
    with pytest.raises(auth.Denied, match="the master has none, so it is not followed"):
        door.receive(guest().knock)
    who = guest()  # a master that does not say so, and shows nothing or something made up
    for shown, said in ((b"", "the master has none"), (b"x" * 32, "does not know")):
        with pytest.raises(auth.Denied, match=said):
            who.answer(m.Challenge(m.PROTOCOL_VERSION, "1", 7, b"n" * 32, shown))


def test_who_has_no_token_is_told_so_by_a_challenge_with_a_proof() -> None:
    with pytest.raises(auth.Denied, match="this job has a token and this side has none"):
        guest("").answer(m.Challenge(m.PROTOCOL_VERSION, "1", 7, b"n" * 32, b"x" * 32))


def test_a_proof_where_none_is_wanted_is_wrong() -> None:
    door = keeper("")
    knock(door, guest(""))
    with pytest.raises(auth.Denied, match="proof of the job's token is wrong"):
        door.receive(m.Proof(b"x" * 32))


@pytest.mark.parametrize("shown", [b"", b"\0" * 32, b"x" * 32], ids=["none", "zeros", "noise"])
def test_a_wrong_proof(shown: bytes) -> None:
    door = keeper()
    knock(door, guest())
    with pytest.raises(auth.Denied, match="proof of the job's token is wrong"):
        door.receive(m.Proof(shown))
    assert not door.is_authenticated


@pytest.mark.parametrize("other", ["open sesamf", TOKEN + " ", TOKEN[:-1], "x"])
def test_two_tokens_part_both_ways(other: str) -> None:
    who, door = guest(other), keeper()
    challenge = knock(door, who)
    with pytest.raises(auth.Denied, match="does not know this job's token"):
        who.answer(challenge)
    said = auth.prove(other, auth.Side.PEER, door._exchange)
    with pytest.raises(auth.Denied, match="is wrong"):
        door.receive(m.Proof(said))


# ---------------------------------------------------------------- attacks


def test_a_masters_proof_reflected_to_it_is_none() -> None:
    who, door = guest(), keeper()
    with pytest.raises(auth.Denied, match="is wrong"):
        door.receive(m.Proof(knock(door, who).proof))


def test_an_agents_proof_reflected_to_it_is_none() -> None:
    """Somebody plays the master to an agent, with proofs that agents have shown to it."""
    who, door = guest(), keeper()
    challenge = knock(door, who)
    shown = who.answer(challenge).proof
    with pytest.raises(auth.Denied, match="does not know"):
        guest().answer(structs.replace(challenge, proof=shown))
    with pytest.raises(auth.Denied, match="does not know"):
        who.answer(structs.replace(challenge, proof=shown))


def test_no_proof_is_good_twice() -> None:
    who, door = guest(), keeper()
    proof = who.answer(knock(door, who))
    door.receive(proof)
    again = keeper()
    knock(again, who)  # the very same knock
    with pytest.raises(auth.Denied, match="is wrong"):
        again.receive(proof)
    challenge = knock(keeper(), guest())  # an older challenge for a new knock
    with pytest.raises(auth.Denied, match="does not know"):
        guest().answer(challenge)


def test_a_proof_gotten_from_one_session_opens_no_other() -> None:
    """The attacker asks the master by one stream what to show on the other."""
    one, other = keeper(), keeper()
    honest = guest()
    challenge = knock(one, honest)
    knock(other, guest())
    with pytest.raises(auth.Denied, match="is wrong"):
        other.receive(honest.answer(challenge))


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": "other"},
        {"role": m.Role.READER},
        {"node": "n1"},
        {"incarnation": "i1"},
        {"peer_nonce": b"x" * 32},
        {"master_nonce": b"x" * 32},
        {"term": 8},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("side", auth.Side)
def test_everything_that_was_said_is_in_the_proof(change: dict[str, Any], side: auth.Side) -> None:
    said = auth.Exchange(JOB, m.Role.AGENT, NODE, LIFE, b"a" * 32, b"b" * 32, 7)
    shown = auth.prove(TOKEN, side, said)
    assert auth.is_valid_proof(TOKEN, side, said, shown)
    assert not auth.is_valid_proof(TOKEN, side, dataclasses.replace(said, **change), shown)


def test_words_do_not_run_together() -> None:
    one = auth.Exchange("ab", m.Role.AGENT, "c", LIFE, b"a" * 32, b"b" * 32, 7)
    other = dataclasses.replace(one, job_id="a", node="bc")
    assert auth.prove(TOKEN, auth.Side.PEER, one) != auth.prove(TOKEN, auth.Side.PEER, other)


def test_the_proof_is_an_hmac_sha256_as_the_page_says() -> None:
    """Written out once more, so that a change of the bytes is a change of the protocol."""
    said = auth.Exchange("j", m.Role.AGENT, "n", "i", b"a" * 32, b"b" * 32, 5)
    parts = (b"j", b"agent", b"n", b"i", b"5", b"a" * 32, b"b" * 32)
    text = b"elasticrun/13 peer" + b"".join(len(x).to_bytes(4, "big") + x for x in parts)
    assert auth.prove("t", auth.Side.PEER, said) == hmac.digest(b"t", text, hashlib.sha256)


def test_a_term_changed_on_the_way_is_noticed() -> None:
    who, door = guest(), keeper(term=7)
    challenge = knock(door, who)
    with pytest.raises(auth.Denied, match="does not know"):
        who.answer(structs.replace(challenge, term=8))


@pytest.mark.parametrize("change", [{"node": "n1"}, {"incarnation": "i1"}], ids=str)
def test_a_session_is_its_nodes_own(change: dict[str, str]) -> None:
    who, door = guest(), keeper()
    door.receive(who.answer(knock(door, who)))
    with pytest.raises(auth.OutOfTurn, match="another node"):
        door.receive(structs.replace(HELLO, **change))
    assert not door.is_authenticated


def test_another_job_is_named_where_there_is_no_secret_and_only_there() -> None:
    with pytest.raises(auth.Denied, match=r"'mine'.*'job'"):
        keeper("").receive(guest("", job_id="mine").knock)
    with pytest.raises(auth.Denied) as told:
        keeper().receive(guest(job_id="mine").knock)
    assert str(told.value) == auth.OTHER_JOB


@pytest.mark.slow
@given(st.lists(draw.reports, max_size=6), st.sampled_from(["", TOKEN]))
@settings(max_examples=examples(50), deadline=None)
def test_no_conversation_gets_in_without_the_token(said: list[m.Report], token: str) -> None:
    """Whatever comes in whatever order; and once refused, nothing helps any more."""
    door = keeper(TOKEN)
    shut = False
    for report in [guest(token or "x").knock, *said]:
        sentence = _told(door, report)
        assert TOKEN not in sentence
        assert sentence or not shut
        shut = shut or bool(sentence)
        assert not door.is_authenticated


def _told(door: auth.AuthServer, report: m.Report) -> str:
    """The refusal of this message, "" if it was taken."""
    try:
        door.receive(report)
    except (auth.Denied, auth.OutOfTurn) as refused:
        return str(refused)
    return ""


def test_after_a_refusal_the_right_proof_is_too_late() -> None:
    who, door = guest(), keeper()
    right = who.answer(knock(door, who))
    with pytest.raises(auth.Denied):
        door.receive(m.Proof(b"x" * 32))
    with pytest.raises(auth.OutOfTurn):
        door.receive(right)
    with pytest.raises(auth.OutOfTurn):
        door.receive(who.knock)
    assert not door.is_authenticated
