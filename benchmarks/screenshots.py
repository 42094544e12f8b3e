"""Take screenshots of the local page for inspection: `python -m benchmarks.screenshots DIRECTORY [RUN ...]`.

RUN is an argument of `wandb-gradwatch view`. Each is drawn in light and dark, as on a phone and as printed, and so are
a bad batch, a NaN, a healthy run, a thousand layers (synthetic) and 20 runs of other learning rates. axe-core checks
the accessibility of each page. After `make demo`, `docs demo-run --only page workspace` makes the pictures of the
README and of the workspace. Needs playwright, Chromium, and pypdfium2 for what is printed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import nn

from wandb_gradwatch import JSONLSink, watch
from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._measure.columns import FloatArray
from wandb_gradwatch._page.history import OwnSeries, RunHistory
from wandb_gradwatch._page.page import write_page
from wandb_gradwatch._page.read import read_run
from wandb_gradwatch._report.report import write_preview, write_workspace_preview

NUM_STEPS: Final = 300
BAD_STEP: Final = 123
SHEETS_IN_ROW, SHEET_GAP = 3, 8  # of a printed page; the gap in pixels


@dataclass(frozen=True)
class Shot:
    """One picture.

    Args:
        name: the name of the file, without its suffix.
        read: returns the runs on the page.
        width: the width of the window.
        height: the height of the window, to which the picture is cut; None: the whole page.
        scheme: "light" or "dark".
        prints: print the page to a PDF, and draw that.
        preview: "report" or "workspace": draw what W&B would show instead of the page.
    """

    name: str
    read: Callable[[], list[RunHistory]]
    width: int = 1400
    height: int | None = None
    scheme: str = "light"
    prints: bool = False
    preview: str = ""


def main() -> None:
    """Write one PNG for each shot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the pictures, without their suffix")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for shot in shots(arguments.runs, Path(folder)):
            if arguments.only is None or shot.name in arguments.only:
                with opened(shot, browser, Path(folder)) as page:
                    found = violations(page)
                    file = arguments.directory / f"{shot.name}.png"
                    file.write_bytes(picture_of(shot, page))
                    print(f"{file}: {found or 'nothing'} found by axe")


def shots(runs: list[Path], folder: Path) -> Iterator[Shot]:
    """Yield the shots of these runs, and of those that are made here, in all states of the page."""
    for number, run in enumerate(runs):
        read = partial(read_all, run)
        yield from in_all_looks(run.name, read)
        if number == 0:
            yield Shot("page", read, height=1250)
            yield Shot("report", read, height=1500, preview="report")
            yield Shot("workspace", read, height=1250, preview="workspace")
    yield from in_all_looks("healthy", lambda: [trained(folder / "healthy.jsonl")])
    yield from in_all_looks("bad-batch", lambda: [trained(folder / "bad-batch.jsonl", factor=8.0)])
    yield from in_all_looks("nan", lambda: [trained(folder / "nan.jsonl", factor=float("nan"))])
    yield from in_all_looks("layers", lambda: [many_layers()])
    yield from in_all_looks("runs", partial(sweep, folder))


def in_all_looks(name: str, read: Callable[[], list[RunHistory]]) -> Iterator[Shot]:
    once = cache(read)
    yield Shot(f"{name}-light", once)
    yield Shot(f"{name}-dark", once, scheme="dark")
    yield Shot(f"{name}-phone", once, width=400)
    yield Shot(f"{name}-print", once, prints=True)


def read_all(run: Path) -> list[RunHistory]:
    return [read_run(run)]


def sweep(folder: Path) -> list[RunHistory]:
    """Train with 20 learning rates, the largest of which diverge."""
    return [trained(folder / f"rate-{rate:.2g}.jsonl", rate=float(rate)) for rate in np.logspace(-3.0, 1.0, 20)]


def trained(file: Path, *, rate: float = 0.01, factor: float = 1.0) -> RunHistory:
    """Train a small network to its end, and return the run; the batch at BAD_STEP is multiplied by `factor`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    teacher = torch.randn(16, 1)
    sink = JSONLSink(file, config={"lr": rate, "batch": 64})
    with watch(model, sinks=[sink], sample_every=1, log_every=10) as watcher:
        for step in range(1, NUM_STEPS + 1):
            inputs = torch.randn(64, 16) * (factor if step == BAD_STEP else 1.0)
            loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
            watcher.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return read_run(file)


@contextmanager
def opened(shot: Shot, browser: Any, folder: Path) -> Iterator[Any]:
    """Open the page of a shot, and wait until it is drawn."""
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height or 900}, color_scheme=shot.scheme
    )
    page, file, histories = context.new_page(), folder / "page.html", shot.read()
    first = histories[0]
    if shot.preview == "report":
        written = write_preview("team", "project", first.run_id, history=first, output=file)
    elif shot.preview:
        written = write_workspace_preview("team", "project", history=first, output=file)
    else:
        written = write_page(first, file, others=histories[1:])
    page.goto(written.as_uri())
    page.locator("html[data-state=drawn]").wait_for(state="attached")
    page.wait_for_timeout(200)  # what comes near is drawn in the next frames
    yield page
    context.close()


def picture_of(shot: Shot, page: Any) -> bytes:
    """Return the PNG of a shot."""
    if shot.prints:
        return drawn(page.pdf(format="A4", print_background=True))
    for canvas in page.locator(".frame canvas:not(.overlay):visible").all() if shot.height is None else ():
        canvas.scroll_into_view_if_needed()  # so that it is drawn
    page.evaluate("scrollTo(0, 0)")  # where the toolbar lies above everything
    page.wait_for_timeout(200)
    return bytes(page.screenshot(full_page=shot.height is None))


def drawn(pdf: bytes) -> bytes:
    """Draw the sheets of a PDF beside each other, as a PNG."""
    import pypdfium2  # type: ignore[import-not-found, unused-ignore]  # needed here alone

    sheets = [sheet.render(scale=1.2).to_pil() for sheet in pypdfium2.PdfDocument(pdf)]
    across, down = (size + SHEET_GAP for size in sheets[0].size)
    rows = -(-len(sheets) // SHEETS_IN_ROW)
    whole = Image.new("RGB", (across * min(len(sheets), SHEETS_IN_ROW), down * rows), "gray")
    for number, sheet in enumerate(sheets):
        whole.paste(sheet, (across * (number % SHEETS_IN_ROW), down * (number // SHEETS_IN_ROW)))
    file = BytesIO()
    whole.save(file, "PNG")
    return file.getvalue()


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """What axe-core complains of: the rule, and where."""
    import axe_playwright_python

    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    return [(one["id"], [str(node["target"]) for node in one["nodes"]][:5]) for one in found]


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser with playwright."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def many_layers(num_blocks: int = 166, num_rows: int = 200) -> RunHistory:
    """Return a synthetic run of 1,000 layers whose block 90 explodes."""
    rng = np.random.default_rng(0)
    kinds = ("norm.weight", "norm.bias", "attn.weight", "attn.bias", "mlp.weight", "mlp.bias")
    names = ["embed.weight", *(f"blocks.{block}.{kind}" for block in range(num_blocks) for kind in kinds)]
    names += ["norm.weight", "head.weight", "head.bias"]
    steps = 10 * np.arange(1, num_rows + 1)
    values: dict[str, FloatArray] = {}
    squares = np.zeros((2, num_rows))  # of the last sample of each row, and of the largest
    for place, name in enumerate(names):
        norm = 10 ** (-place / 500 + 0.1 * rng.normal(size=num_rows))
        if name.startswith("blocks.90."):
            norm[120:124] *= 1e4
        key, largest = name.replace(".", "/"), norm * (1 + rng.random(num_rows))
        squares += [norm**2, largest**2]
        values |= {f"grad_norm/{key}": norm, f"grad_norm_max/{key}": largest}
        values |= {f"num_nonfinite/{key}": np.where((steps == 1230) & (name == "blocks.90.mlp.weight"), 7.0, 0.0)}
    values |= dict(zip(("gradwatch/grad_norm", "gradwatch/grad_norm_max"), np.sqrt(squares), strict=True))
    values["gradwatch/num_nan"] = np.where(steps == 1230, 7.0, 0.0)
    loss = 2 + np.exp(-np.arange(1.0, 10 * num_rows + 1) / 300)
    return RunHistory(
        path=Path("run-layers.wandb"),
        run_id="layers",
        name="a thousand layers",
        steps=steps,
        values=values,
        config={"gradwatch": {"names": names}},
        incidents=(explosion(),),
        own={"loss": OwnSeries(np.arange(1.0, 10 * num_rows + 1), loss)},
    )


def explosion() -> Incident:
    """Return what is told of block 90."""
    layers = tuple(Layer(f"blocks.90.{kind}", 3e3, 0.3) for kind in ("mlp.weight", "attn.weight", "norm.weight"))
    return Incident(
        *("exploding_gradient", "Exploding gradient", "ERROR", 1210, 1210, 1240),
        "The gradient norm is 10,000 times the usual one",
        recovered_step=1250,
        cause="attention_logits",
        cause_text="attention logits that are too large",
        advice="normalise queries and keys",
        layers=layers,
    )


if __name__ == "__main__":
    main()
