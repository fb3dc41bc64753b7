"""Who may use a bridge: loopback or mutual TLS, and a token that is a secret."""

from pathlib import Path

import pytest

from region_app.bridge.endpoint import Endpoint, authorisation, is_authorised, is_loopback
from regionfed.errors import ConfigurationError

SECRET = "s" * 32


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(SECRET + "\n")
    return path


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("coordinator:1", False),
        ("localhost.example:1", False),
        (":1", False),
        ("", False),
    ],
)
def test_what_is_this_machine(address: str, local: bool, token: Path) -> None:
    """Anything else needs mutual TLS."""
    assert is_loopback(address) is local
    if local:
        assert Endpoint(address, token).secret() == SECRET
    else:
        with pytest.raises(ConfigurationError, match="mutual TLS"):
            Endpoint(address, token)


def test_a_token_must_be_a_secret(token: Path) -> None:
    token.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        Endpoint("127.0.0.1:1", token).secret()


@pytest.mark.parametrize("content", ["", "short", "s" * 31])
def test_a_token_must_be_long(content: str, token: Path) -> None:
    token.write_text(content)
    with pytest.raises(ConfigurationError, match="fewer than 32"):
        Endpoint("127.0.0.1:1", token).secret()


def test_no_token_and_no_certificates(tmp_path: Path, token: Path) -> None:
    with pytest.raises(ConfigurationError, match="no bridge token"):
        Endpoint("127.0.0.1:1", tmp_path / "none").secret()
    with pytest.raises(ConfigurationError, match="certificates"):
        Endpoint("10.0.0.1:1", token, tmp_path).connect([])


@pytest.mark.parametrize(
    ("metadata", "welcome"),
    [
        (authorisation(SECRET), True),
        ((), False),
        (None, False),
        ((("authorization", SECRET),), False),
        ((("authorization", "Bearer "),), False),
        ((("authorization", f"Bearer {SECRET}x"),), False),
        ((("authorization", "Bearer ä" + SECRET),), False),
        ((("token", f"Bearer {SECRET}"),), False),
        ((("authorization", f"Bearer {SECRET}".encode()),), False),
    ],
)
def test_only_the_whole_token_opens(metadata: object, welcome: bool) -> None:
    assert is_authorised(metadata, SECRET) is welcome
