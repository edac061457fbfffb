"""Whether a server can be reached, found out fast: libraries retry for a minute or more without a connection."""

import contextlib
import queue
import socket
import threading
import urllib.parse
import urllib.request

SECONDS = 0.9


def why_unreachable(url: str, seconds: float = SECONDS) -> str | None:
    """Return why a server cannot be reached, after at most `seconds`.

    Only a TCP connection is opened, to the proxy where the environment names one. Nothing is sent.

    Args:
        url: An address on the server, such as "https://huggingface.co".
        seconds: The longest wait, for the name server too.

    Returns:
        The reason in words; None where a connection was opened.
    """
    target = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = target.hostname or "", target.port or (80 if target.scheme == "http" else 443)
    answers: queue.Queue[str | None] = queue.Queue()

    def connect() -> None:
        try:
            with contextlib.closing(socket.create_connection((host, port), timeout=seconds)):
                answers.put(None)
        except OSError as error:
            answers.put(f"{host}: {error.strerror or error}")

    # In a thread of its own, since a name server that does not answer has no other time limit.
    threading.Thread(target=connect, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return f"{host} does not answer"
