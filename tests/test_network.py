"""Whether a server can be reached is known within a second."""

import socket
import threading
import time

import pytest

from m2s import network
from m2s.network import why_unreachable


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> socket.socket:
    """A socket that accepts connections on a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def test_a_server_that_listens(server: socket.socket) -> None:
    assert why_unreachable(f"http://127.0.0.1:{server.getsockname()[1]}/file") is None


def test_a_port_that_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        port = opened.getsockname()[1]
    assert "127.0.0.1: " in str(why_unreachable(f"https://127.0.0.1:{port}"))


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()

    def never_answer(*_: object, **__: object) -> socket.socket:
        hang.wait(20)
        raise OSError

    monkeypatch.setattr(network.socket, "create_connection", never_answer)
    start = time.monotonic()
    assert why_unreachable("https://example.org", 0.1) == "example.org does not answer"
    assert time.monotonic() - start < 10  # it does not wait for the thread
    hang.set()


def test_the_proxy_is_asked_where_there_is_one(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = f"127.0.0.1:{server.getsockname()[1]}"
    for value in (proxy, f"http://{proxy}"):
        monkeypatch.setenv("https_proxy", value)
        assert why_unreachable("https://no-such-host.invalid") is None
    monkeypatch.setenv("no_proxy", "no-such-host.invalid")
    assert why_unreachable("https://no-such-host.invalid") is not None
