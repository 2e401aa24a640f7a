"""Servers are kept equally busy; one that misbehaves ends as it should, and nothing of ours stays where they write."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from extraction_server import HIDDEN, streams_of
from unruly_server import UnrulyServer

from speculators.data.endpoints import ClosedError, Endpoints, GivenUpError
from speculators.data.extract_rest import RestSource
from speculators.data.own_files import OwnFiles, remove_abandoned
from speculators.data.stored_states import HiddenStates
from speculators.errors import UserError

LAYERS = 4
IDS = np.arange(3, 10, dtype=np.int32)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    """Where the servers write; at the end, a stranger's file is all that may be there."""
    path = tmp_path / "storage"
    path.mkdir()
    stranger = path / "cmpl-somebody-else-0.safetensors"
    stranger.write_text("not ours")
    yield path
    assert list(path.iterdir()) == [stranger]


def server_in(storage: Path, script=lambda number, ids: "well", port: int = 0) -> UnrulyServer:
    return UnrulyServer(storage, lambda ids: streams_of(ids, LAYERS), script, port)


def source(url: str, storage: Path, **settings: float) -> RestSource:
    settings = {"timeout_s": 20.0, "linger_s": 5.0, "late_s": 0.05} | settings
    return RestSource(url, storage, LAYERS - 1, HIDDEN, **settings)


def endpoints(*sources: RestSource, attempts: int = 4, **settings) -> Endpoints:
    return Endpoints(sources, attempts, **{"say": lambda line: None, "first_pause_s": 0.001} | settings)


def assert_right(states: HiddenStates, ids: np.ndarray = IDS) -> None:
    wanted = streams_of(ids.tolist(), LAYERS)
    assert torch.equal(states.aux_hidden, wanted[:, :-1])
    assert torch.equal(states.last_hidden, wanted[:, -1])
    assert states.ids.tolist() == ids.tolist()


FAILURES = {
    "error": "status 503, .*out of luck",
    "hang_up": "RemoteDisconnected",
    "no_file": "cannot be read",
    "other_tokens": "of the tokens sent",
    "other_layers": "came back as .*, expected",
    "nan": "aux_hidden is not finite .first at token 1",
}


@pytest.mark.parametrize("action", FAILURES)
def test_a_failure_that_passes_is_tried_again_until_the_states_are_right(storage: Path, action: str):
    with (
        server_in(storage, lambda number, ids: action if number < 4 else "well") as server,
        endpoints(source(server.url, storage)) as fetch,
    ):
        assert_right(fetch("s1", IDS))
        assert len(server.requests) == 4


@pytest.mark.parametrize("action", FAILURES)
def test_a_failure_that_lasts_names_endpoint_sample_and_last_answer(storage: Path, action: str):
    with server_in(storage, lambda number, ids: action) as server, endpoints(source(server.url, storage)) as fetch:
        words = rf"^{server.url}: .*sample s1 \(7 tokens\) after 4 failed requests in a row; .*{FAILURES[action]}"
        with pytest.raises(GivenUpError, match=words):
            fetch("s1", IDS)
        assert len(server.requests) == 4


def test_a_failure_that_is_tried_again_is_told_but_not_each_time(storage: Path):
    said: list[str] = []
    with (
        server_in(storage, lambda number, ids: "error" if number < 4 else "well") as server,
        endpoints(source(server.url, storage), say=said.append) as fetch,
    ):
        fetch("s1", IDS)
    assert said == [f'{server.url}: status 503, {{"error": "out of luck 1"}}; sample s1 again in 0.001 s']


def test_a_refused_sample_is_not_asked_for_again(storage: Path):
    with server_in(storage, lambda number, ids: "refuse") as server, endpoints(source(server.url, storage)) as fetch:
        with pytest.raises(GivenUpError, match="refused sample s1"):
            fetch("s1", IDS)
        assert len(server.requests) == 1


def test_a_file_elsewhere_ends_the_run_and_is_left_alone(storage: Path):
    precious = storage.parent / "elsewhere.safetensors"
    precious.write_text("keep me")
    with (
        server_in(storage, lambda number, ids: "elsewhere") as server,
        endpoints(source(server.url, storage)) as fetch,
        pytest.raises(UserError, match=r"--storage-path: .*outside"),
    ):
        fetch("s1", IDS)
    assert precious.read_text() == "keep me"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_server_that_is_not_up_yet_is_waited_for_with_a_line(storage: Path):
    port, said, waiting = free_port(), [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    with (
        endpoints(source(f"http://127.0.0.1:{port}", storage), attempts=1, say=say) as fetch,
        ThreadPoolExecutor() as pool,
    ):
        results = [pool.submit(fetch, f"s{i}", IDS + i) for i in range(5)]
        assert waiting.wait(20)
        with server_in(storage, port=port):
            for i, result in enumerate(results):
                assert_right(result.result(), IDS + i)
    assert f"waiting for http://127.0.0.1:{port}, where nothing answers" in said[0]
    assert said[-1] == f"http://127.0.0.1:{port} answers again."


def test_a_server_that_never_comes_is_given_up_after_the_request_timeout(storage: Path):
    with endpoints(source("http://127.0.0.1:1", storage, timeout_s=0.03)) as fetch:
        words = r"^http://127.0.0.1:1: .*s1 .*nothing answered for 0.03 s .--request-timeout.; .*ConnectionError"
        with pytest.raises(GivenUpError, match=words):
            fetch("s1", IDS)


@pytest.mark.parametrize("action", ["slow", "locked"])
def test_a_slow_server_is_waited_for(storage: Path, action: str):
    with (
        server_in(storage, lambda number, ids: action) as server,
        endpoints(source(server.url, storage)) as fetch,
        ThreadPoolExecutor() as pool,
    ):
        result = pool.submit(fetch, "s1", IDS)
        assert server.arrived.acquire(timeout=20)
        assert not result.done()
        server.release.set()
        assert_right(result.result())
        assert len(server.requests) == 1


@pytest.mark.parametrize(("action", "words"), [("slow", "no answer within 0.1 s"), ("locked", "not whole after 0.1 s")])
def test_a_server_that_is_too_slow_is_given_up_and_its_late_files_are_removed(storage: Path, action: str, words: str):
    with server_in(storage, lambda number, ids: action) as server:
        fetch = endpoints(source(server.url, storage, timeout_s=0.1, late_s=5.0), attempts=2)
        with fetch:
            with pytest.raises(GivenUpError, match=words):
                fetch("s1", IDS)
            server.release.set()


def test_leaving_cuts_what_is_in_flight_and_removes_the_file_that_comes_after_it(storage: Path):
    with server_in(storage, lambda number, ids: "late") as server, ThreadPoolExecutor() as pool:
        with endpoints(source(server.url, storage, linger_s=0.3, late_s=5.0)) as fetch:
            result = pool.submit(fetch, "s1", IDS)
            assert server.arrived.acquire(timeout=20)
            result.add_done_callback(lambda _: server.release.set())
        with pytest.raises(ClosedError):
            result.result()


def test_one_server_down_leaves_all_to_the_other_until_it_is_back(storage: Path):
    port = free_port()
    with server_in(storage) as up, ThreadPoolExecutor(4) as pool:
        sources = source(up.url, storage), source(f"http://127.0.0.1:{port}", storage)
        with endpoints(*sources, attempts=1) as fetch:
            for i, states in enumerate(pool.map(lambda i: fetch(f"s{i}", IDS + i), range(20))):
                assert_right(states, IDS + i)
            assert len(up.requests) == 20
            with server_in(storage, port=port) as back:
                while not back.requests:
                    assert_right(fetch("s1", IDS))
                before = len(up.requests), len(back.requests)
                for i in range(10):
                    fetch("s1", IDS + i)
                assert abs((len(up.requests) - before[0]) - (len(back.requests) - before[1])) <= 10
                assert len(up.requests) + len(back.requests) == sum(before) + 10


class Scripted(RestSource):
    """A server that answers at once; `during[sample_id]` runs while that sample is in flight."""

    def __init__(self, number: int, asked: dict[str, int], during: dict[str, Callable[[], object]]) -> None:
        super().__init__("http://127.0.0.1:1", Path("/nowhere"), LAYERS - 1, HIDDEN)
        self._number, self._asked, self._during = number, asked, during

    def once(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        self._asked[sample_id] = self._number
        self._during.get(sample_id, lambda: None)()
        return HiddenStates(torch.tensor(ids), torch.zeros(1, 1, 1), torch.zeros(1, 1))


class Pool:
    """`asked[sample_id]` is the number of the server that was asked for it."""

    def __init__(self, number: int) -> None:
        self.asked: dict[str, int] = {}
        self.during: dict[str, Callable[[], object]] = {}
        self.fetch = endpoints(*(Scripted(i, self.asked, self.during) for i in range(number)))

    def ask(self, name: str, length: int) -> None:
        self.fetch(name, np.zeros(length, np.int32))


def test_samples_that_are_done_at_once_go_to_each_server_in_turn():
    pool = Pool(3)
    for n in range(9):
        pool.ask(str(n), 5)
    assert list(pool.asked.values()) == [0, 1, 2] * 3


def test_a_busy_server_is_left_alone_until_the_others_have_as_many_tokens():
    pool = Pool(2)
    pool.during.update(
        {
            "long": lambda: [pool.ask("short", 40), pool.ask("other", 300), pool.ask("held", 60)],
            "held": lambda: [pool.ask("even", 30), pool.ask("held too", 50)],
            "held too": lambda: pool.ask("now less", 1),
        }
    )
    pool.ask("long", 100)
    assert pool.asked == {
        "long": 0, "short": 1, "other": 1, "held": 1, "even": 1, "held too": 1, "now less": 0
    }  # fmt: skip


def test_a_failure_leaves_no_tokens_in_flight():
    def fail() -> None:
        raise UserError("out of luck")

    pool = Pool(2)
    pool.during["bad"] = fail
    with pytest.raises(UserError, match="out of luck"):
        pool.ask("bad", 1000)
    del pool.during["bad"]
    share = [0, 0]
    for i in range(200):
        pool.during[f"a{i}"] = lambda i=i: pool.ask(f"b{i}", 10)
        pool.ask(f"a{i}", 10)
        share[pool.asked[f"a{i}"]] += 1
        share[pool.asked[f"b{i}"]] += 1
    assert abs(share[0] - share[1]) <= 1 + 1000 // 10


def test_only_files_of_processes_that_are_no_more_are_abandoned(storage: Path):
    mark = OwnFiles(storage).mark()
    gone = mark.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-")
    ours, theirs = (storage / f"cmpl-{name}0.safetensors" for name in (mark, gone))
    for file in (ours, theirs):
        file.touch()
        file.with_name(file.name + ".lock").touch()
    assert remove_abandoned(storage) == 1
    assert not theirs.exists()
    assert ours.exists()
    ours.unlink()
    ours.with_name(ours.name + ".lock").unlink()


def test_at_the_end_a_settled_questions_lock_goes_and_the_files_of_others_stay(tmp_path: Path) -> None:
    files = OwnFiles(tmp_path)
    left = tmp_path / f"cmpl-{files.mark()}-0-abc.safetensors.lock"
    others = tmp_path / "cmpl-somebody-else-0-abc.safetensors"
    left.touch()
    others.touch()
    files.sweep()
    assert left.exists(), "nothing is expected, so nothing is looked for"
    files.sweep_rest()
    assert list(tmp_path.iterdir()) == [others]
