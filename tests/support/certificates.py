"""A self-signed certificate of this machine, for servers of tests."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def make_certificate(folder: Path) -> Path:
    """Create a file with a key and a self-signed certificate for 127.0.0.1."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    begin, end = now - timedelta(days=1), now + timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begin, end)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    signed = made.add_extension(address, critical=False).sign(key, hashes.SHA256())
    plain = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    (folder / "pem").write_bytes(key.private_bytes(*plain) + signed.public_bytes(Encoding.PEM))
    return folder / "pem"


def make_context(certificate: Path) -> ssl.SSLContext:
    """Return the context of a server with a certificate of :func:`make_certificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context
