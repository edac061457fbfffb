"""The folder and the server of the lab, and its command. `test_lab_browser.py` opens the page."""

import errno
import http.client
import os
import signal
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.fork import forked

from m2s.cli import main
from m2s.errors import UserError
from m2s.hub import builtin
from m2s.report import lab

ROOT = Path(__file__).parents[2]


def test_every_file_of_the_folder_is_one_of_the_package_or_of_weights(tmp_path: Path) -> None:
    paths = lab.write_lab(tmp_path / "lab", documentation=True)
    assert [path.name for path in paths] == list(lab.FILES) == sorted(lab.FILES, key=lab.FILES.index)
    assert sorted(paths) == sorted((tmp_path / "lab").iterdir())
    for name in ("index.html", "lab.js", "lab.css"):
        assert (tmp_path / "lab" / name).read_bytes() == (ROOT / "m2s" / "report" / "lab" / name).read_bytes()
    assert sum((tmp_path / "lab" / name).stat().st_size for name in ("index.html", "lab.js", "lab.css")) < 300_000


def test_weights_are_those_of_the_package() -> None:
    names = [name.removeprefix("weights-").removesuffix(".js") for name in lab.FILES if name.startswith("weights-")]
    assert set(names) < set(builtin.names()) and len(names) == 3
    for name in names:
        assert lab.lab_file(f"weights-{name}.js", documentation=False).decode() == lab.weights_script(name)


def test_the_page_requests_nothing_from_elsewhere() -> None:
    """Every address in the bundle is a namespace of SVG, or relative."""
    for name in ("index.html", "lab.js", "lab.css"):
        text = lab.lab_file(name, documentation=True).decode()
        assert text.count("//") == text.count("http://www.w3.org/2000/svg"), name


def test_the_link_to_the_documentation_is_in_the_site_alone() -> None:
    with_link, without = (lab.lab_file("index.html", documentation=wanted).decode() for wanted in (True, False))
    assert f'href="{lab.DOCUMENTATION}"' in with_link and "Documentation" not in without
    assert len(without) > 0.95 * len(with_link)


def test_unknown_files_are_an_error() -> None:
    with pytest.raises(KeyError, match="weights-mnist"):
        lab.lab_file("weights-mnist.js", documentation=False)


def test_existing_files_are_replaced_on_request_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lab"
    out.mkdir()
    (out / "lab.css").write_text("mine")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["lab", "--out", str(out)])
    assert stop.value.code == 2 and "lab.css is there already: give another --out" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in out.iterdir()} == {"lab.css": "mine", "notes.txt": "mine"}
    main(["lab", "--out", str(out), "--overwrite"])
    assert capsys.readouterr().out == f"{out / 'index.html'} written: open it in a browser\n"
    assert {path.name for path in out.iterdir()} == {*lab.FILES, "notes.txt"}
    assert (out / "lab.css").read_bytes() == lab.lab_file("lab.css", documentation=False)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--out", "lab", "--port", "8000"], "--out writes a folder and starts no server: leave out --port and --no-open"),
        (["--out", "lab", "--no-open"], "--out writes a folder and starts no server: leave out --port and --no-open"),
        (["--overwrite"], "--overwrite replaces the files of a folder: give the folder with --out"),
        (["--port", "0"], "--port is 0, but it must be in 1..65535"),
        (["--port", "65536"], "--port is 65536, but it must be in 1..65535"),
    ],
)
def test_options_that_exclude_each_other(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["lab", *words])
    assert stop.value.code == 2 and capsys.readouterr().err == f"m2s: {error}\n"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def server() -> Iterator[lab.LabServer]:
    """A running server."""
    with lab.LabServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def request(server: lab.LabServer, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    """Status, media type and content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path)
    answer = connection.getresponse()
    found = answer.status, answer.headers["Content-Type"], answer.read()
    connection.close()
    return found


def test_the_server_has_the_files_and_nothing_else(server: lab.LabServer) -> None:
    assert server.address == f"http://127.0.0.1:{server.server_port}/" and server.server_address[0] == "127.0.0.1"
    for name in lab.FILES:
        status, kind, content = request(server, f"/{name}?x=1")
        assert (status, content) == (200, lab.lab_file(name, documentation=False))
        assert kind.startswith({"html": "text/html", "js": "text/javascript", "css": "text/css"}[name.rpartition(".")[2]])
    assert request(server, "/") == request(server, "/index.html")
    assert request(server, "/", "HEAD") == (200, "text/html; charset=utf-8", b"")
    for path in ("/files.py", "/../files.py", "//etc/passwd", "/weights-digits-m2s.js", "/lab.js/", "/%2e%2e/lab.js"):
        assert request(server, path)[0] == 404, path
    assert request(server, "/", "POST")[0] == 501


def test_a_port_in_use_is_an_error(server: lab.LabServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=os.strerror(errno.EADDRINUSE).lower()):
        lab.LabServer(server.server_port)
    with pytest.raises(SystemExit) as stop:
        main(["lab", "--no-open", "--port", str(server.server_port)])
    assert stop.value.code == 2 and capsys.readouterr().err.startswith(f"m2s: --port is {server.server_port}, but")


@pytest.mark.parametrize("opens", [True, False])
def test_ctrl_c_ends_the_server_without_a_message(opens: bool, tmp_path: Path) -> None:
    """Ctrl-C comes when the server has answered a request."""

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        opened: list[str] = []
        called = threading.Event()
        if not opens:
            called.set()
        webbrowser.open = lambda address: (opened.append(address), called.set())  # type: ignore[assignment, return-value]
        serve = lab.LabServer.serve_forever

        def serve_and_press(self: lab.LabServer) -> None:
            def visit() -> None:
                assert request(self, "/lab.css")[0] == 200 and called.wait(60)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=visit, daemon=True).start()
            serve(self, poll_interval=0.01)

        lab.LabServer.serve_forever = serve_and_press  # type: ignore[method-assign, assignment]
        main(["lab", *([] if opens else ["--no-open"])])
        print("opened", *opened)

    ended = forked(work, tmp_path)
    assert ended.code == 0 and ended.err == "" and not ended.traceback
    address, opened = ended.out.splitlines()
    assert address.startswith("The lab is at http://127.0.0.1:") and address.endswith("/ until Ctrl-C.")
    assert opened == (f"opened {address.split()[4]}" if opens else "opened")
