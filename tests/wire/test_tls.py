"""TLS: files that do not fit are one sentence each, and what fits is served as without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrun.config import Tls
from elasticrun.wire import auth
from elasticrun.wire.rpc import channel as c
from elasticrun.wire.types import Endpoint
from tests.certificates import Authority
from tests.master.people import LIMIT, at_once, serving, status

ADDRESS = "IP:127.0.0.1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tls]:
    """What two authorities have signed."""
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = Authority(folder).create(), Authority(folder, "other").create()
    good = ours.sign("good", ADDRESS, "DNS:localhost")
    foreign = theirs.sign("foreign", ADDRESS)
    return {
        "good": good,
        "elsewhere": ours.sign("elsewhere", "DNS:elsewhere"),
        "expired": ours.sign("expired", ADDRESS, expired=True),
        "foreign": foreign,
        "intruder": dataclasses.replace(foreign, ca=good.ca),
        "ca-only": Tls(ca=good.ca),
        "no-ca": dataclasses.replace(good, ca=""),
    }


def raw(files: Tls | None) -> auth.Pem | None:
    """Their contents, whether they fit or not."""
    if files is None:
        return None
    parts = (files.cert, files.key, files.ca)
    return auth.Pem(*(Path(path).read_bytes() if path else b"" for path in parts))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("kind", ["good", "elsewhere", "foreign", "ca-only", "no-ca"])
def test_what_fits_is_read(files: Mapping[str, Tls], kind: str) -> None:
    assert auth.read_pem(files[kind]) == raw(files[kind])


def test_a_key_is_not_shown(files: Mapping[str, Tls]) -> None:
    assert "PRIVATE" not in repr(auth.read_pem(files["good"]))


def test_each_misfit_is_a_sentence(files: Mapping[str, Tls], tmp_path: Path) -> None:
    good = files["good"]
    noise = tmp_path / "noise.pem"
    noise.write_bytes(b"\0" * 100)
    half = tmp_path / "half.pem"
    half.write_bytes(Path(good.ca).read_bytes()[:100])
    huge = tmp_path / "huge.pem"
    huge.write_bytes(Path(good.ca).read_bytes() + b"\n" * auth.MAX_PEM_BYTES)
    cases = {
        "has expired": files["expired"],
        "is not signed by --tls-ca": files["intruder"],
        "do not belong together": dataclasses.replace(good, key=files["elsewhere"].key),
        "cannot be read: No such file": dataclasses.replace(good, ca=str(tmp_path / "none")),
        "noise.pem is no PEM file": dataclasses.replace(good, ca=str(noise)),
        "half.pem holds no certificate": dataclasses.replace(good, ca=str(half)),
        "huge.pem is no PEM file": Tls(ca=str(huge)),
        "and --tls-key": dataclasses.replace(good, cert=good.key),
    }
    for said, wrong in cases.items():
        with pytest.raises(auth.TlsError) as told:
            auth.read_pem(wrong)
        assert said in str(told.value)
        assert "--tls-" in str(told.value)
        assert "\n" not in str(told.value)


def test_a_master_needs_a_certificate(files: Mapping[str, Tls]) -> None:
    with pytest.raises(auth.TlsError, match="needs a certificate"):
        auth.read_pem(files["ca-only"], serving=True)


# ---------------------------------------------------------------- who is served


@pytest.mark.parametrize(
    ("master", "peer", "name"),
    [
        ("good", "good", ""),
        ("good", "good", "localhost"),
        ("elsewhere", "good", "elsewhere"),
        ("no-ca", "ca-only", ""),
    ],
    ids=["mutual", "by-another-name", "as-it-was-named", "master-alone"],
)
async def test_what_fits_is_served(
    files: Mapping[str, Tls], master: str, peer: str, name: str
) -> None:
    async with serving(tls=raw(files[master])) as served:
        pem = raw(files[peer])
        page = await c.get_status(served.endpoint, LIMIT, tls=pem, name=name)
        assert at_once(page) == status()


@pytest.mark.parametrize(
    ("master", "peer"),
    [
        ("good", "ca-only"),
        ("good", "intruder"),
        ("good", "expired"),
        ("good", None),
        ("foreign", "good"),
        ("elsewhere", "good"),
        ("expired", "good"),
        (None, "good"),
    ],
)
async def test_what_does_not_fit_is_not(
    files: Mapping[str, Tls], master: str | None, peer: str | None
) -> None:
    async with serving(tls=raw(files[master] if master else None)) as served:
        pem = raw(files[peer] if peer else None)
        with pytest.raises(c.LinkError) as refused:
            await c.get_status(served.endpoint, LIMIT, tls=pem)
        assert not refused.value.rejected
        assert not served.brain.events


async def test_the_port_is_one_masters_over_tls_too(files: Mapping[str, Tls]) -> None:
    pem = raw(files["good"])
    async with serving(tls=pem) as served:
        for other in (pem, None):
            server = c.make_server(served.servicer.attend, served.servicer.status, max_calls=1)
            with pytest.raises(c.ListenError, match="another process listens") as refused:
                c.listen(server, "127.0.0.1", served.endpoint.port, other)
            assert refused.value.taken


async def test_a_proxy_is_not_asked_over_tls_either(
    files: Mapping[str, Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(tls=raw(files["good"])) as served:
        where = Endpoint("localhost", served.endpoint.port)
        page = await c.get_status(where, LIMIT, tls=raw(files["good"]))
        assert at_once(page) == status()
