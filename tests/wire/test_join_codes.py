"""Join codes: what they say, and what is sealed under them."""

from __future__ import annotations

import pytest

from elasticrun.wire.auth import (
    JOIN_CODE_LIFE,
    BadCode,
    code_secret,
    join_code,
    parse_code,
    seal,
    unseal,
)

TOKEN = "a secret of the job that nobody guesses"
NOW = 1_800_000_000.7


def test_a_code_is_one_word_that_can_be_read_back() -> None:
    code = join_code(TOKEN, NOW)
    text = str(code)
    assert text.isalnum()
    assert len(text) == 32
    assert code.until == int(NOW) + JOIN_CODE_LIFE
    assert parse_code(text) == code
    assert parse_code(f" {text[:16].upper()}-{text[16:]}\n") == code  # as a person retypes it
    assert code.secret == code_secret(TOKEN, code.until)
    assert code.secret not in repr(code)


def test_another_token_or_time_makes_another_secret() -> None:
    code = join_code(TOKEN, NOW)
    assert len(code.secret) * 4 == 128  # bits
    others = {code_secret(TOKEN, code.until + 1), code_secret(TOKEN + "x", code.until)}
    assert len(others | {code.secret}) == 3


@pytest.mark.parametrize("text", ["", "aaaa", "1" * 32, "a" * 33, "ü" * 32, "=" * 32])
def test_what_is_no_code_is_one_sentence(text: str) -> None:
    with pytest.raises(BadCode, match="copy the whole line that the first machine printed"):
        parse_code(text)


@pytest.mark.parametrize("plain", [b"", b"x", b"token" * 40_000])
def test_what_is_sealed_is_read_by_who_has_the_secret_and_the_nonces(plain: bytes) -> None:
    secret = code_secret(TOKEN, 7)
    sealed = seal(secret, b"n" * 32, plain)
    assert unseal(secret, b"n" * 32, sealed) == plain
    assert seal(secret, b"m" * 32, plain) != sealed
    with pytest.raises(BadCode, match="changed on its way"):
        unseal(secret, b"m" * 32, sealed)
    with pytest.raises(BadCode, match="changed on its way"):
        unseal(code_secret(TOKEN, 8), b"n" * 32, sealed)


def test_one_changed_character_is_noticed() -> None:
    secret = code_secret(TOKEN, 7)
    sealed = seal(secret, b"n" * 32, b"the token")
    for at, letter in enumerate(sealed.rstrip("=")[:-1]):
        changed = sealed[:at] + ("A" if letter != "A" else "B") + sealed[at + 1 :]
        with pytest.raises(BadCode):
            unseal(secret, b"n" * 32, changed)
    with pytest.raises(BadCode):
        unseal(secret, b"n" * 32, "no base64!")
