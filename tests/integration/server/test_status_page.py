"""Health, metrics and the status page over HTTP; the page in a real browser, if there is one."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_process import ServiceProcess, configuration, flip, service
from waiting import eventually

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PHONE = {"width": 360, "height": 740}
CONFIGURATION = """
    [checkpoints]
    directory = "{folder}"
    every_s = 3600
    [tables.plain]
    [tables.replay]
    rate_limiter = "ratio"
    samples_per_insert = 4
    min_size = 10
    error_buffer = 40
    max_size = 1000
    [tables.queue]
    rate_limiter = "queue"
    max_size = 2
    [tables.unused]
    max_size = 1000
    sequence_length = 4
    signature = {{obs = "uint8[100]"}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A server with 10 items in `replay`, 20 samples of them, and a writer that waits for room in `queue`."""
    folder = tmp_path_factory.mktemp("service")
    text = CONFIGURATION.format(folder=folder / "checkpoints")
    with service(folder, text) as server, rw.Client(server.address) as client:
        for _ in range(10):
            client.insert(np.zeros(3), {"replay": 1.0})
        assert len(list(client.sample("replay", 20))) == 20
        client.checkpoint()
        for _ in range(2):
            client.insert(np.zeros(3), {"queue": 1.0})
        waiting = threading.Thread(target=lambda: client.insert(np.zeros(3), {"queue": 1.0}, timeout_s=300))
        waiting.start()
        eventually(lambda: blocked(server) and server.status()["checkpoints"]["kept"], "the monitor has seen it all")
        yield server
        list(client.sample("queue", 1))
        waiting.join()


def blocked(server: ServiceProcess) -> list[Any]:
    return [one for table in server.status()["tables"] for one in table["blocked"]]


def test_health_is_told_to_those_who_ask_and_nothing_else_is_done(served: ServiceProcess) -> None:
    assert served.get("/livez") == (200, "alive\n")
    assert served.get("/readyz") == (200, "serving\n")
    assert served.get("/nowhere")[0] == 404
    with contextlib.closing(HTTPConnection("127.0.0.1", served.http_port)) as http:
        for method, status, size in (
            ("HEAD", 200, 0),
            ("GET", 200, 8),
            ("POST", 405, 10),
        ):  # "serving" and a line's end
            http.request(method, "/readyz")
            with http.getresponse() as reply:
                assert (reply.status, len(reply.read())) == (status, size)


def test_metrics_are_those_of_the_tables(served: ServiceProcess) -> None:
    found = served.metrics()
    # 10 inserts x 4 - 20 samples = 20, between 4 x 10 - 40 = 0 and 80.
    expected = {
        "size": 10, "max_size": 1000, "fill_ratio": 0.01, "inserts_total": 10, "samples_total": 20, "ratio_wanted": 4,
        "ratio_reached": 2, "diff": 20, "min_diff": 0, "max_diff": 80, "insert_room": 15, "sample_room": 20,
    }  # fmt: skip
    assert {name: found[f'reverb_table_{name}{{table="replay"}}'] for name in expected} == expected
    assert found['reverb_table_blocked_seconds{side="inserts",table="queue"}'] > 0
    assert found['reverb_table_blocked_seconds{side="inserts",table="replay"}'] == 0
    assert found['reverb_table_worker_seconds_total{state="waiting_for_sampling",table="queue"}'] > 0
    assert 0 < found["reverb_memory_bytes"] < found["reverb_memory_limit_bytes"]
    assert (found["reverb_ready"], found["reverb_starts_total"], found["reverb_checkpoints_kept"]) == (1, 1, 1)
    assert found["reverb_checkpoint_bytes"] > 0
    assert found["reverb_start_time_seconds"] < found["reverb_checkpoint_timestamp_seconds"] <= time.time()
    assert found["reverb_checkpoint_interval_seconds"] == 3600
    assert found['reverb_table_max_diff{table="plain"}'] == math.inf
    for name in ("ratio_wanted", "diff"):
        assert f'reverb_table_{name}{{table="plain"}}' not in found  # it keeps none
    assert 0 < found["reverb_disk_free_bytes"] < found["reverb_disk_size_bytes"]
    versions = 'dm_reverb="0.14.0",python="3.11.'
    assert next(name for name in found if name.startswith("reverb_build_info")).partition("{")[2].startswith(versions)


def test_every_metric_is_explained_and_every_explained_one_is_told(served: ServiceProcess) -> None:
    guide = Path(__file__).parents[3] / "docs/reference/metrics.md"
    _, _, rows = guide.read_text().partition("## All metrics")
    explained = {name for row in rows.splitlines() for name in re.findall(r"`([^`]+)`", row.partition(" | ")[0])}
    told = {name.partition("{")[0] for name in served.metrics()}
    # The server itself has asked for no checkpoint, and has no gateway.
    elsewhere = {"reverb_checkpoint_duration_seconds", "reverb_certificate_expiry_timestamp_seconds"}
    assert told | elsewhere == explained


def test_port_of_http_that_is_taken_is_refused(tmp_path: Path, served: ServiceProcess) -> None:
    with contextlib.closing(ServiceProcess(tmp_path, "", "--http-port", str(served.http_port))) as server:
        assert server.process.wait(60) == 1
        assert f"port {served.http_port} is in use" in server.log()


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_host_of_http_that_is_not_this_machine_is_refused(tmp_path: Path, host: str) -> None:
    with contextlib.closing(ServiceProcess(tmp_path, f'[http]\nhost = "{host}"')) as server:
        assert server.process.wait(60) == 1
        assert f"reverb_writer_server: `http.host`: got {host}, allowed: an address of this machine.\n" in server.log()


@pytest.fixture
def page(browser: Any, served: ServiceProcess) -> Iterator[Any]:
    """The status page on a phone; whatever it complains of or loads from elsewhere fails the test."""
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(f"http://127.0.0.1:{served.http_port}/")
    page.wait_for_selector("section[data-table]")
    yield page
    context.close()
    assert complaints == []
    assert {url for url in requested if not url.startswith(f"http://127.0.0.1:{served.http_port}/")} <= {"data:,"}


def test_page_shows_the_tables_and_says_which_side_is_blocked(page: Any) -> None:
    replay, queue = page.locator("[data-table=replay]"), page.locator("[data-table=queue]")
    assert "10 of 1,000 items" in replay.inner_text()
    assert "2.00 of 4" in replay.inner_text()
    assert "inserts \u00d7 4 \u2212 samples = 20" in replay.inner_text()
    assert "Nobody waits." in replay.inner_text()
    assert "inserts in all\n10\nsamples in all\n20" in replay.inner_text()
    assert "Nobody waits; the next sample would wait for an insert." in page.locator("[data-table=plain]").inner_text()
    assert page.locator("#age").inner_text().startswith("figures of ")
    sentence = queue.locator(".blocked").inner_text()
    assert sentence.startswith("inserts have stood still for ")
    assert sentence.endswith("1 sample unblocks the next insert; so does a larger `max_size`.")
    assert page.locator("#phase").inner_text() == "serving, a side is blocked"
    assert "1" in page.locator("#kept").inner_text()


def test_page_begins_with_memory_and_the_newest_checkpoint_and_shows_an_unused_table_small(page: Any) -> None:
    of_service, *tables = (section.get_attribute("id") for section in page.locator("section").all())
    assert (of_service, {*tables}) == ("service", {None})
    text = page.locator("#service").inner_text().splitlines()
    assert text[::2] == ["memory", "full tables need", "newest checkpoint", "kept on disk"]
    assert " of " in text[1]
    assert text[3] == "at least 951.8 KiB"  # three tables without a signature
    assert text[5].endswith(" ago")
    unused = page.locator("[data-table=unused]")
    assert "0 of 1,000 items, about 0 B of 951.8 KiB, 0.0 %" in unused.inner_text()
    assert unused.locator("svg").count() == 0
    # At once, because the page draws itself again every second.
    of_table = "name => document.querySelector(`[data-table=${name}]`).offsetHeight"
    heights = page.evaluate(f"['unused', 'replay'].map({of_table})")
    assert 0 < heights[0] < heights[1] / 4


@contextlib.contextmanager
def opened(browser: Any, server: ServiceProcess) -> Iterator[Any]:
    with contextlib.closing(browser.new_page()) as page:
        page.goto(f"http://127.0.0.1:{server.http_port}/")
        yield page


def test_page_of_a_server_that_cannot_start_has_a_line_for_each_difference(browser: Any, tmp_path: Path) -> None:
    text = CONFIGURATION.format(folder=tmp_path / "checkpoints")
    with service(tmp_path, text) as server:
        assert server.end() == 0
    text = text.replace("max_size = 1000", "max_size = 999")
    for _ in range(2):
        with contextlib.closing(ServiceProcess(tmp_path, text)) as server:
            assert server.process.wait(60) == 3
    with contextlib.closing(ServiceProcess(tmp_path, text)) as server:
        eventually(lambda: server.get("/readyz")[0] == 503 and server.status()["phase"] == "failed", "it stays up")
        with opened(browser, server) as page:
            _shows(page, "#phase", "table `replay`: max_size is 1000 in the checkpoint, 999 in the configuration\n")


def test_page_is_live(page: Any, served: ServiceProcess) -> None:
    with rw.Client(served.address) as client:
        client.insert(np.zeros(3), {"replay": 1.0})
        _shows(page, "[data-table=replay]", "11 of 1,000")
        (sample,) = client.sample("replay", 1)
        client.mutate_priorities("replay", deletes=[sample.info.key])
        _shows(page, "[data-table=replay]", "10 of 1,000")


def test_page_fits_a_phone_and_draws_each_side_on_an_axis_of_its_own(page: Any, served: ServiceProcess) -> None:
    def insert_and_sample() -> bool:
        client.insert(np.zeros(3), {"plain": 1.0})
        list(client.sample("plain", 200))
        return all(
            page.evaluate(f"document.querySelector('[data-table=plain] path.{side}').getBBox().height") > 20
            for side in sides
        )

    sides = ("inserts", "samples")
    with rw.Client(served.address) as client:
        client.insert(np.zeros(3), {"plain": 1.0})
        page.wait_for_selector("[data-table=plain] path.inserts")  # a table that nobody has written has no charts
        eventually(insert_and_sample, "a line of inserts is no flat one beside 200 times as many samples")
    tops = [
        page.locator(f"[data-table=plain] figure:has(path.{side}) .heights span").first.inner_text() for side in sides
    ]
    inserts, samples = (float(text.replace(",", "")) for text in tops)
    assert samples >= 10 * inserts > 0
    times = page.locator("[data-table=plain] figure").first.locator(".times span").all_inner_texts()
    assert len(times) == 5
    assert times[-1] == "now"
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_page_tells_when_reverb_is_silent_or_gone_and_how_old_figures_are(browser: Any, tmp_path: Path) -> None:
    with service(tmp_path, "[tables.replay]") as server, opened(browser, server) as page:
        _shows(page, "#phase", "serving")
        assert "good" in page.locator("#phase").get_attribute("class")
        os.kill(server.child(), signal.SIGSTOP)
        _shows(page, "#phase", "the server has not answered for ")
        assert "bad" in page.locator("#phase").get_attribute("class")
        assert page.locator("#tables").get_attribute("class") == "old"
        seconds = int(page.locator("#age").inner_text().removeprefix("figures of ").removesuffix(" s ago"))
        assert seconds >= 6
        os.kill(server.child(), signal.SIGCONT)
        _shows(page, "#phase", "serving")
        assert server.end() == 0
        _shows(page, "#phase", "no answer; figures are old")


def test_page_tells_of_damaged_checkpoints_and_of_jobs_that_fail(browser: Any, tmp_path: Path) -> None:
    text = configuration(tmp_path)
    for _ in range(2):
        with service(tmp_path, text) as server:
            assert server.end() == 0
    newest = max((tmp_path / "checkpoints/kept").iterdir())
    flip(newest / "tables.tfrecord")
    with service(tmp_path, text) as server, opened(browser, server) as page:
        _shows(page, "#faults", f"Checkpoint {newest.name} is damaged. The log says why.")
        empty = tmp_path / "checkpoints/incoming/2026-01-01T00:00:00+00:00"
        empty.mkdir()
        (empty / "DONE").touch()
        _shows(page, "#faults", "Job keep has failed once. The log says why.")


def _shows(page: Any, selector: str, text: str) -> None:
    eventually(lambda: text in page.locator(selector).inner_text(), f"{selector} shows {text}")
