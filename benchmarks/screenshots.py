"""Take screenshots of the local page for inspection: `python -m benchmarks.screenshots DIRECTORY RUN [RUN ...]`.

RUN is an argument of `wandb-gradwatch view`. The first run is drawn in all states of the page, and compared with the
others if there are any; a run with a thousand layers is synthetic. After `make demo`, `docs demo-run --only page
workspace` makes the pictures of the README and of the workspace. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._measure.columns import FloatArray
from wandb_gradwatch._page.history import OwnSeries, RunHistory
from wandb_gradwatch._page.page import write_page
from wandb_gradwatch._page.read import read_run
from wandb_gradwatch._report.report import write_preview, write_workspace_preview


@dataclass(frozen=True)
class Shot:
    """One picture.

    Args:
        name: the name of the file, without its suffix.
        histories: the runs on the page.
        width: the width of the window.
        height: the height of the window.
        scheme: "light" or "dark".
        act: actions on the page before the picture is taken.
        whole: take the whole page, not only the first screen.
        prints: use the print layout.
        preview: "report" or "workspace": draw what W&B would show instead of the page.
    """

    name: str
    histories: list[RunHistory]
    width: int = 1400
    height: int = 900
    scheme: str = "light"
    act: Callable[[Any], object] = lambda page: None
    whole: bool = False
    prints: bool = False
    preview: str = ""


def main() -> None:
    """Write one PNG for each shot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the pictures, without their suffix")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    wanted = shots([read_run(run) for run in arguments.runs])
    for name, picture in take([shot for shot in wanted if arguments.only is None or shot.name in arguments.only]):
        (arguments.directory / f"{name}.png").write_bytes(picture)
        print(arguments.directory / f"{name}.png")


def shots(histories: list[RunHistory]) -> Iterator[Shot]:
    """Return the shots of all states of the page."""
    one = histories[:1]
    yield Shot("page", one, height=1250)
    yield Shot("first", one)
    yield Shot("dark", one, scheme="dark")
    yield Shot("whole", one, whole=True, act=unfold)
    yield Shot("narrow", one, width=400, whole=True)
    yield Shot("print", one, width=800, whole=True, prints=True)
    yield Shot("layers", [many_layers()], whole=True)
    yield Shot("layers-first", [many_layers()], height=1250)
    yield Shot("report", one, height=1500, preview="report")
    yield Shot("workspace", one, height=1250, preview="workspace")
    if len(histories) > 1:
        yield Shot("runs", histories, whole=True)
        yield Shot("runs-narrow", histories, width=400, whole=True)


def unfold(page: Any) -> None:
    """Open everything that is folded, and scroll through it, so that it is drawn."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    for canvas in page.locator(".frame canvas:not(.overlay)").all():
        canvas.scroll_into_view_if_needed()


def take(wanted: list[Shot]) -> Iterator[tuple[str, bytes]]:
    """Yield each shot's name and its PNG."""
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for shot in wanted:
            size = {"width": shot.width, "height": shot.height}
            context = browser.new_context(viewport=size, color_scheme=shot.scheme)
            page = context.new_page()
            first, file = shot.histories[0], Path(folder) / "page.html"
            if shot.preview == "report":
                written = write_preview("team", "project", first.run_id, history=first, output=file)
            elif shot.preview:
                written = write_workspace_preview("team", "project", history=first, output=file)
            else:
                written = write_page(first, file, others=shot.histories[1:])
            page.goto(written.as_uri())
            page.locator("html[data-state=drawn]").wait_for(state="attached")
            if shot.prints:
                page.evaluate("dispatchEvent(new Event('beforeprint'))")
            shot.act(page)
            page.wait_for_timeout(200)  # what comes near is drawn in the next frames
            yield shot.name, page.screenshot(full_page=shot.whole)
            context.close()


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
