"""A server of the lab for this machine alone."""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from m2s.errors import UserError
from m2s.report.lab.files import FILES, PAGE, lab_file

HOST = "127.0.0.1"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}


class LabServer(ThreadingHTTPServer):
    """A server of the files of the lab, and of nothing else. Only this machine can reach it.

    Args:
        port: The port; 0 takes a free one.

    Raises:
        UserError: The port is in use, or the system does not allow it.
    """

    def __init__(self, port: int = 0) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                option="port", value=port, reason=reason, hint="give another one, or none for a free one"
            ) from error

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the files of the lab."""

    def do_GET(self) -> None:  # http.server looks methods up by this name
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, with_content: bool) -> None:
        """Send a file, or 404."""
        name = self.path.partition("?")[0].removeprefix("/") or PAGE
        if name not in FILES:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = lab_file(name, documentation=False)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", TYPES[name[name.rindex(".") :]])
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal shows the address only."""
