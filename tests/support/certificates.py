"""Certificates for tests: a CA of their own, server and client certificates, good, foreign and expired ones."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from jserve.server.client_common import ClientTls

DAY = datetime.timedelta(days=1)


class Authority:
    """A CA in `folder`; writes PEM files and returns their paths."""

    def __init__(self, folder: Path, name: str = "ca"):
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, self._key, 10 * DAY)
        certificate = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = str(folder / f"{name}.pem")
        Path(self.path).write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def issue(
        self, name: str, *, expired: bool = False, file: str | None = None, uri: str | None = None
    ) -> tuple[str, str]:
        """(certificate, key) files for localhost, 127.0.0.1 and `name`; with `uri`, which then is its only name."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.DNSName(f"{name}.test"),
                 x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        if uri is not None:
            name, file, names = "", file or name, [x509.UniformResourceIdentifier(uri)]
        builder = _builder(name, self._name, key, -DAY if expired else 5 * DAY)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate_path, key_path = (self._folder / f"{file or name}.{kind}" for kind in ("pem", "key"))
        certificate_path.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                               serialization.NoEncryption()))
        return str(certificate_path), str(key_path)

    def client(self, name: str | None = None, **how) -> ClientTls:
        """How a client that trusts this CA, and is `name` itself, connects."""
        cert, key = (None, None) if name is None else self.issue(name, **how)
        return ClientTls(ca=self.path, cert=cert, key=key, server_name="localhost")


def https_context(tls: ClientTls) -> ssl.SSLContext:
    """The same for plain HTTP requests."""
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _builder(name: str, issuer: str, key, lifetime: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 3 * DAY)
        .not_valid_after(now + lifetime)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
