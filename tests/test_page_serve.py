"""The page of a live run is served on the loopback interface only, to requests with the token only."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wandb_gradwatch._page import serve
from wandb_gradwatch._page.history import RunHistory
from wandb_gradwatch._page.serve import LOOPBACK, PageServer

HISTORY = RunHistory(Path("run-x.wandb"), "x", np.array([10]), {"gradwatch/grad_norm": np.ones(1)}, finished=False)


@pytest.fixture
def server() -> Iterator[PageServer]:
    page = PageServer(HISTORY)
    yield page
    page.close()


def ask(server: PageServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.getheader("Access-Control-Allow-Origin") is None
    connection.close()
    return answer.status, text


def test_the_address_with_its_token_has_the_page_and_its_data(server: PageServer) -> None:
    status, page = ask(server, f"/{server.token}/")
    assert status == 200
    assert "connect-src 'self'" in page
    assert ask(server, f"/{server.token}/data?after=1") == (204, "")
    server.update(replace(HISTORY, finished=True))
    status, text = ask(server, f"/{server.token}/data?after=1")
    assert status == 200
    content = json.loads(text)["content"]
    assert (content["version"], content["run"]["finished"]) == (2, True)
    assert server.fetched == 2


def test_other_requests_are_rejected(server: PageServer) -> None:
    page, here = f"/{server.token}/", f"{LOOPBACK}:{server.server_port}"
    assert server.address == f"http://{here}{page}"
    assert len(server.token) >= 20
    for path in ("/", "/data", "/x" + page, page[:-2] + "/", page + "../../etc/passwd"):
        assert ask(server, path)[0] == 404, path
    for headers in ({"Host": "gradwatch.example"}, {"Host": here, "Origin": "http://example.com"}, {"Origin": "null"}):
        assert ask(server, page, **headers) == (403, "Only pages of this very address are answered.")
    assert ask(server, page, Origin=f"http://{here}")[0] == 200
    assert ask(server, page, method="POST")[0] == 501
    assert server.server_address[0] == "127.0.0.1"  # no other interface


def test_a_client_that_says_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch, server: PageServer) -> None:
    monkeypatch.setattr(serve._Handler, "timeout", 0.05)
    with socket.create_connection((LOOPBACK, server.server_port), timeout=10) as silent:
        assert silent.recv(1) == b""  # the server has closed the connection


def test_more_clients_than_a_browser_has_are_refused_and_later_ones_served(server: PageServer) -> None:
    address = (LOOPBACK, server.server_port)
    silent = [socket.create_connection(address, timeout=10) for _ in range(serve.MAX_CONNECTIONS)]
    with socket.create_connection(address, timeout=10) as refused:
        assert refused.recv(1) == b""
    for one in silent:
        one.shutdown(socket.SHUT_WR)  # the server reads the end of a request that never came
        assert one.recv(1) == b""
        one.close()
    assert server._free.acquire(timeout=10)  # one of the threads has ended
    server._free.release()
    assert ask(server, f"/{server.token}/")[0] == 200


def test_a_client_that_is_gone_prints_nothing(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise ConnectionResetError
    except ConnectionResetError:
        server.handle_error(None, ("", 0))
    assert capfd.readouterr().err == ""
    try:
        raise KeyError("ours")
    except KeyError:
        server.handle_error(None, ("", 0))
    assert "KeyError" in capfd.readouterr().err
