"""Signs with a private key that is not a file here: a token behind PKCS#11, or any signer that a URI can name.

`<name>.uri` in the keys folder holds one line. `pkcs11:token=T;object=LABEL?module-path=/usr/lib/...so` (RFC 7512)
signs ed25519 through OpenSC's pkcs11-tool, so that the key never leaves the token; the PIN comes from `pin-source=FILE`
in the URI or from the variable AVOCADO_PKCS11_PIN, never from the command line, which others can read. Any other scheme
is looked up in securesystemslib's table of signers, where a project can register its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, Key, SecretsHandler, Signature, Signer, SSlibKey

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import run

SCHEME = "pkcs11"
PIN_VARIABLE = "AVOCADO_PKCS11_PIN"
_TIMEOUT_S = 60.0  # some tokens wait for a touch


@dataclass(frozen=True, slots=True)
class Pkcs11Uri:
    """The parts of an RFC 7512 URI that name one key."""

    module: str
    token: str
    label: str
    pin_source: str

    @classmethod
    def parse(cls, text: str) -> Pkcs11Uri:
        """Raises `keys` unless it names a module, a token and an object."""
        path, _, query = text.removeprefix(f"{SCHEME}:").partition("?")
        parts = dict(piece.partition("=")[::2] for piece in [*path.split(";"), *query.split("&")] if piece)
        values = {name: unquote(value) for name, value in parts.items()}
        missing = [name for name in ("token", "object", "module-path") if not values.get(name)]
        if missing:
            raise OperationError(
                ErrorCode.KEYS,
                f"cannot use {text!r}: it has no {missing[0]}",
                "Write it so: pkcs11:token=NAME;object=LABEL?module-path=/usr/lib/softhsm/libsofthsm2.so",
            )
        return cls(values["module-path"], values["token"], values["object"], values.get("pin-source", ""))


class Pkcs11Signer(Signer):
    """An ed25519 key in a token."""

    def __init__(self, uri: Pkcs11Uri, public_key: Key) -> None:
        self._uri = uri
        self._public_key = public_key

    @property
    def public_key(self) -> Key:
        """The public half, as root.json has it."""
        return self._public_key

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: SecretsHandler | None = None
    ) -> Pkcs11Signer:
        """As securesystemslib's table of signers calls it."""
        return cls(Pkcs11Uri.parse(priv_key_uri), public_key)

    def sign(self, payload: bytes) -> Signature:
        """Raises `keys` when the token does not sign, `tool-missing` without pkcs11-tool."""
        with tempfile.TemporaryDirectory(prefix="avocado-sign-") as folder:
            data, signature = Path(folder, "data"), Path(folder, "signature")
            data.write_bytes(payload)
            files = ["--input-file", str(data), "--output-file", str(signature)]
            _run(self._uri, ["--sign", "--mechanism", "EDDSA", *files], with_pin=True)
            return Signature(self._public_key.keyid, signature.read_bytes().hex())


SIGNER_FOR_URI_SCHEME[SCHEME] = Pkcs11Signer


def open_uri(file: Path, key: Key, passphrase: bytes | None) -> Signer:
    """The signer that a .uri file names. Raises `keys`."""
    text = file.read_text(encoding="utf-8").strip()
    try:
        return Signer.from_priv_key_uri(text, key, lambda _: (passphrase or b"").decode())
    except (ValueError, OSError, ImportError) as cause:
        raise OperationError(ErrorCode.KEYS, f"cannot sign with {file}: {cause}") from cause


def read_public(text: str) -> Key:
    """The public half of the key that a pkcs11 URI names. Raises `keys`, `tool-missing`."""
    uri = Pkcs11Uri.parse(text)
    with tempfile.TemporaryDirectory(prefix="avocado-sign-") as folder:
        file = Path(folder, "public")
        _run(uri, ["--read-object", "--type", "pubkey", "--output-file", str(file)], with_pin=False)
        try:
            data = file.read_bytes()
            # OpenSC writes EdDSA keys as PEM and the others as DER.
            public = load_pem_public_key(data) if data.startswith(b"-----") else load_der_public_key(data)
        except (ValueError, OSError) as cause:
            raise OperationError(ErrorCode.KEYS, f"cannot use {text!r}: its public key does not read") from cause
    if not isinstance(public, Ed25519PublicKey):
        raise OperationError(ErrorCode.KEYS, f"cannot use {text!r}: it is not an ed25519 key")
    return SSlibKey.from_crypto(public)


def _run(uri: Pkcs11Uri, arguments: list[str], *, with_pin: bool) -> None:
    argv = ["pkcs11-tool", "--module", uri.module, "--token-label", uri.token, "--label", uri.label]
    if with_pin:
        argv += ["--login", "--pin", f"env:{PIN_VARIABLE}"]
    done = run([*argv, *arguments], _TIMEOUT_S, env=_pin(uri) if with_pin else None)
    if done.status:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot use {uri.label} of token {uri.token}: {done.last_words}",
            f"Check the token and its PIN ({PIN_VARIABLE}): pkcs11-tool --module {uri.module} --list-objects",
        )


def _pin(uri: Pkcs11Uri) -> Mapping[str, str] | None:
    if not uri.pin_source:
        return None
    file = Path(uri.pin_source.removeprefix("file:"))
    try:
        return {PIN_VARIABLE: file.read_text(encoding="utf-8").strip()}
    except OSError as cause:
        raise OperationError(ErrorCode.KEYS, f"cannot read the PIN from {file}: {cause.strerror}") from cause
