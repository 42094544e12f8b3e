"""Measure how fast the local page responds and a run is read: `python -m benchmarks.page RUN`, into docs/page.md.

RUN is an argument of `wandb-gradwatch view`; its records are repeated to make the files that are read, of up to 1 GB.
The page shows a synthetic run of 1,000 layers and 5,000 rows. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from wandb.proto import wandb_internal_pb2

from wandb_gradwatch._measure.columns import NUM_BINS
from wandb_gradwatch._page.history import HistogramSeries, RunHistory
from wandb_gradwatch._page.page import write_page
from wandb_gradwatch._page.read import HEADER, PART, find_run_file
from wandb_gradwatch.snapshot import keys

from .machine import describe_machine
from .screenshots import chromium, many_layers

PAGE: Final = Path(__file__).parents[1] / "docs" / "page.md"
GOAL_MS: Final = 100
ROUNDS: Final = 6  # even: what is switched is switched back
WRAPPED: Final = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)
"""  # in a small process: what is started begins with the memory of who starts it
READ: Final = "import sys; from wandb_gradwatch._page.read import read_run; read_run(sys.argv[1])"

# What a person does: the words, and what does it in the page. `round` counts from 0; `all` and `one` find elements.
INTERACTIONS: Final = {
    "pointer over an incident's strip": "point(one('#incidents .frame canvas'), 0.4 + 0.1 * round, 0.5)",
    "pointer over the layers": "point(one('#layers .frame canvas'), 0.4 + 0.1 * round, 0.5)",
    "pointer over a line": "point(one('#norm .frame canvas'), 0.3 + 0.1 * round, 0.5)",
    "pointer over the distribution": "point(one('#histogram .frame canvas'), 0.3 + 0.1 * round, 0.5)",
    "zoom all pictures": "enter(one('.range input'), 1000 * (round + 1), 'change')",
    "back to the whole run": "press('.range button')",
    "step of an incident": "press('.incident .link')",
    "layers of an incident": "all('.incident .link').find((one) => one.textContent.startsWith('show')).click()",
    "another metric": "all('#layers .segmented button')[round % 2].click()",
    "layers by change": "all('#layers .segmented')[1].children[round % 2 ? 0 : 1].click()",
    "layers in the model's order": "all('#layers .segmented')[2].children[round % 2 ? 1 : 0].click()",
    "find layers": "enter(one('#layers input[type=search]'), round % 2 ? '' : 'blocks.1', 'input')",
    "distribution of another layer": "enter(one('#histogram select'), 10 * round + 1, 'change')",
    "linear and logarithmic": "all('#norm .segmented button')[round % 2 ? 0 : 1].click()",
    "fold and unfold what is more": "one('#more > summary').click()",
    "light and dark": "press('#theme')",
}
MEASURE: Final = """async (round) => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  const press = (selector) => one(selector).click();
  const enter = (node, value, event) => { node.value = value; node.dispatchEvent(new Event(event)); };
  const point = (node, across, down) => {
    const box = node.getBoundingClientRect();
    const place = { clientX: box.left + across * box.width, clientY: box.top + down * box.height, bubbles: true };
    node.dispatchEvent(new PointerEvent("pointermove", place));
  };
  for (let before = NaN; scrollY !== before; ) { // a smooth scroll of the action before has ended
    before = scrollY;
    await new Promise((done) => setTimeout(() => requestAnimationFrame(done), 100));
  }
  const start = performance.now();
  ACT
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done))); // the frame with it has been made
  return performance.now() - start;
}"""


def large_run() -> RunHistory:
    """Return a run of 1,000 layers and 5,000 rows, with histograms of each layer at 20 of them, and an incident."""
    history = many_layers(num_rows=5_000)
    rng = np.random.default_rng(0)
    some = history.steps[::250]
    histograms = {
        name: HistogramSeries(some, -np.ones(len(some)), np.ones(len(some)), rng.random((len(some), NUM_BINS)))
        for name in history.names
    }
    return replace(history, times=1e9 + history.steps * 0.7, histograms=histograms)


def measure_page(folder: Path) -> dict[str, Any]:
    """Measure milliseconds to the first picture and of every interaction, and the memory of the page."""
    began = time.perf_counter()
    written = write_page(large_run(), folder / "page.html")
    found: dict[str, Any] = {"written_s": time.perf_counter() - began, "mb": written.stat().st_size / 1e6}
    with chromium() as browser:
        page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
        client = page.context.new_cdp_session(page)
        client.send("Performance.enable")
        began = time.perf_counter()
        page.goto(written.as_uri())
        page.locator("html[data-state=drawn]").wait_for(state="attached")
        found["drawn_s"] = time.perf_counter() - began
        found["heap_mb"] = heap_mb(client)
        page.evaluate("document.querySelector('#more').open = true")
        page.locator("#norm canvas").first.scroll_into_view_if_needed()
        found["interactions"] = {name: [] for name in INTERACTIONS}
        for turn in range(ROUNDS):
            for name, body in INTERACTIONS.items():
                found["interactions"][name].append(page.evaluate(MEASURE.replace("ACT", body), turn))
        found["heap_after_mb"] = heap_mb(client)
        found["renderer_mb"] = max(process.memory_info().rss / 1e6 for process in renderers())
        runs = [many_layers(num_blocks=9, num_rows=30) for _ in range(20)]
        written = write_page(runs[0], folder / "runs.html", others=runs[1:])
        began = time.perf_counter()
        page.goto(written.as_uri())
        page.locator("html[data-state=drawn]").wait_for(state="attached")
        found |= {"runs_s": time.perf_counter() - began, "runs_mb": written.stat().st_size / 1e6}
    return found


def renderers() -> list[psutil.Process]:
    """Return the browser's renderer processes."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "--type=renderer" in child.cmdline()]


def heap_mb(client: Any) -> float:
    """Return the size of the JavaScript heap after a garbage collection."""
    client.send("HeapProfiler.collectGarbage")
    metrics = {one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]}
    return float(metrics["JSHeapUsedSize"]) / 1e6


def repeated(source: Path, target: Path, megabytes: float) -> None:
    """Write a run's file of this size in W&B's format, by repeating another run's records at later steps."""
    with source.open("rb") as file:
        records = list(records_of(file.read()))
    items = [item for record in records for item in record.history.item]
    steps = [item for item in items if (item.key or ".".join(item.nested_key)) in ("_step", keys.STEP)]
    length = 1 + max(int(float(item.value_json)) for item in steps)
    with target.open("wb") as file:
        file.write(HEADER)
        while file.tell() < megabytes * 1e6:
            for record in records:
                write_record(file, record.SerializeToString())
            for item in steps:
                item.value_json = str(int(float(item.value_json)) + length)


def records_of(data: bytes) -> Iterator[Any]:
    """Yield every record of a run's file."""
    at, parts = len(HEADER), []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = PART.unpack_from(data, at)
        parts = parts if kind in (3, 4) else []
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(b"".join(parts))  # type: ignore[attr-defined]  # generated


def write_record(file: Any, record: bytes) -> None:
    """Append one record, split at the ends of blocks."""
    rest, kinds = record, {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}
    is_first = True
    while is_first or rest:
        left = 32768 - file.tell() % 32768
        if left < 7:
            file.write(bytes(left))
            left = 32768
        part, rest = rest[: left - 7], rest[left - 7 :]
        kind = kinds[is_first, not rest]
        checksum = zlib.crc32(bytes([kind]) + part)
        file.write(struct.pack("<IHB", checksum, len(part), kind) + part)
        is_first = False


def spent(command: list[str]) -> tuple[float, float]:
    """Run a command; return the processor seconds and the peak memory, in MB, of it and its children."""
    told = subprocess.run([sys.executable, "-c", WRAPPED, *command], check=True, capture_output=True, text=True)
    seconds, megabytes = map(float, told.stdout.split())
    return seconds, megabytes


def measure_reading(run: Path, folder: Path, megabytes: float) -> list[dict[str, float]]:
    """Measure MB per processor second and peak memory of this package's reader and of W&B's, for three sizes of a file.

    The figures of this package's reader do not include its imports.
    """
    nothing = spent([sys.executable, "-c", READ.replace("read_run(sys.argv[1])", "None"), ""])
    rows = []
    for size in (megabytes / 10, megabytes / 3, megabytes):
        file = folder / "run-repeated.wandb"
        repeated(find_run_file(run), file, size)
        mb = file.stat().st_size / 1e6
        ours = spent([sys.executable, "-c", READ, str(file)])
        theirs = spent([sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)])
        speeds = {"ours": mb / (ours[0] - nothing[0]), "wandb": mb / theirs[0]}
        rows.append({"mb": mb, **speeds, "ours_mb": ours[1] - nothing[1], "wandb_mb": theirs[1]})
    return rows


def render(found: dict[str, Any]) -> str:
    """docs/page.md."""
    page, machine = found["page"], found["machine"]
    lines = [f"| {name} | {statistics.median(ms):.0f} | {max(ms):.0f} |" for name, ms in page["interactions"].items()]
    reading = [
        f"| {one['mb']:.0f} | {one['ours']:.0f} | {one['ours_mb']:.0f} | {one['wandb']:.0f} | {one['wandb_mb']:.0f} |"
        for one in found["reading"]
    ]
    faster = [one["ours"] / one["wandb"] for one in found["reading"]]
    met = "the second is met" if min(faster) >= 1 else "neither is met"
    slow = [name for name, ms in page["interactions"].items() if statistics.median(ms) > GOAL_MS]
    return f"""# Speed of the page

Made by `python -m benchmarks.page RUN` on {machine["device"]}, {machine["cores"]} cores, {machine["system"]}, commit
{machine["commit"]}. The browser had no GPU, and other programs ran at the same time.

The page shows a run of 1,000 layers and 5,000 rows, with a distribution of every layer. Its
file has {page["mb"]:.1f} MB and was written in
{page["written_s"]:.1f} s; the incident and every layer were drawn {page["drawn_s"]:.1f} s after it was opened. A page
of 20 runs of 300 steps has {page["runs_mb"]:.1f} MB, and was drawn {page["runs_s"]:.1f} s after it was opened.
The JavaScript heap has
{page["heap_mb"]:.0f} MB then, and {page["heap_after_mb"]:.0f} MB after all actions below; the browser process of
the page has {page["renderer_mb"]:.0f} MB then, including the browser itself.

The table shows the milliseconds from a user's action to the frame with its result,
{ROUNDS} measurements each. The goal is {GOAL_MS}. Slower
actions: {", ".join(slow) or "none"}.

| what | median, ms | slowest, ms |
| --- | --: | --: |
{chr(10).join(lines)}

## Speed of reading a run

The files contain the records of a real run, repeated at later steps. W&B's own reader is `wandb leet inspect --json`,
without parsing of its output. Speeds are per second of processor time. Our reader skips summaries, half of the bytes,
and reads {min(faster):.1f} to {max(faster):.1f} times as fast as W&B's. The goal is 100 MB/s, or
the speed of W&B's own reader: {met}.

Memory is measured in addition to that of the imports. Its limits do not depend on the file: 320 MB for the statistics
of layers and of the model, 128 MB for your own scalars, 70 MB for histograms, and twice as much while the page's arrays
are made. Beyond the limits, rows are merged as windows are, scalars keep their extremes, and histograms are thinned
evenly.

| file, MB | our reader, MB/s | peak memory, MB | W&B's reader, MB/s | peak memory, MB |
| --: | --: | --: | --: | --: |
{chr(10).join(reading)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--megabytes", type=float, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": describe_machine(torch.device("cpu")),
            "page": measure_page(Path(folder)),
            "reading": measure_reading(arguments.run, Path(folder), arguments.megabytes),
        }
    PAGE.write_text(render(found), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
