"""Certificates for tests, made by the openssl command: an authority, and what it signs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from elasticrun.config import Tls
from tests import needs


@dataclass(frozen=True)
class Authority:
    """A CA of its own in a folder."""

    folder: Path
    name: str = "ca"

    @property
    def cert(self) -> str:
        return str(self.folder / f"{self.name}.pem")

    def create(self) -> Authority:
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={self.name}", "-days", "2"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 requires it
            *("-keyout", f"{self.name}.key", "-out", f"{self.name}.pem"),
        )
        return self

    def sign(self, node: str, *names: str, expired: bool = False) -> Tls:
        """A key and a certificate for these names (`DNS:host`, `IP:10.0.0.1`)."""
        self._openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={node}", "-keyout", f"{node}.key", "-out", f"{node}.csr"),
        )
        (self.folder / f"{node}.ext").write_text(
            f"subjectAltName={','.join(names)}\n"
            "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        )
        self._openssl(
            *("x509", "-req", "-in", f"{node}.csr", "-CA", f"{self.name}.pem"),
            *("-CAkey", f"{self.name}.key", "-CAcreateserial", "-extfile", f"{node}.ext"),
            *("-days", "-1" if expired else "2", "-out", f"{node}.pem"),
        )
        files = (str(self.folder / f"{node}.{kind}") for kind in ("pem", "key"))
        return Tls(*files, self.cert)

    def _openssl(self, *words: str) -> None:
        openssl = needs.program("openssl", package="openssl")
        subprocess.run([openssl, *words], cwd=self.folder, check=True, capture_output=True)
