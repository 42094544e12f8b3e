"""Pictures of the local page, to be looked at: `python -m benchmarks.screenshots DIRECTORY RUN [RUN ...]`.

RUN is what `wandb-gradwatch view` takes. The first is drawn in all its states, and beside the others where there are
any; a thousand layers are made up. It needs playwright and a chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from wandb_gradwatch._page.history import OwnSeries, RunHistory
from wandb_gradwatch._page.page import write_page
from wandb_gradwatch._page.read import read_run

HEIGHT: Final = 900


@dataclass(frozen=True)
class Shot:
    """One picture.

    Args:
        name: of the file, without its suffix.
        histories: what the page shows.
        width: of the window.
        scheme: "light" or "dark".
        act: done before the picture is taken.
        whole: the whole page, not the first screen.
        media: "screen" or "print".
    """

    name: str
    histories: list[RunHistory]
    width: int = 1400
    scheme: str = "light"
    act: Callable[[Any], object] = lambda page: None
    whole: bool = False
    media: str = "screen"


def main(directory: Path, runs: list[Path]) -> None:
    """Write one PNG for each shot."""
    directory.mkdir(parents=True, exist_ok=True)
    histories = [read_run(run) for run in runs]
    for name, picture in take(list(shots(histories))):
        (directory / f"{name}.png").write_bytes(picture)
        print(directory / f"{name}.png")


def shots(histories: list[RunHistory]) -> Iterator[Shot]:
    """The states of the page that are worth a look."""
    one = histories[:1]
    yield Shot("first", one)
    yield Shot("dark", one, scheme="dark")
    yield Shot("whole", one, whole=True)
    yield Shot("alert", one, act=open_alert)
    yield Shot("narrow", one, width=400, whole=True)
    yield Shot("print", one, width=800, whole=True, media="print")
    yield Shot("layers", [many_layers()], whole=True)
    if len(histories) > 1:
        yield Shot("runs", histories, whole=True)
        yield Shot("runs-narrow", histories, width=400, whole=True)


def open_alert(page: Any) -> None:
    """Follow the first alert to its step."""
    page.locator("button.alert-step").first.click()
    page.wait_for_timeout(600)  # the page scrolls there smoothly


def take(wanted: list[Shot]) -> Iterator[tuple[str, bytes]]:
    """Yield each shot's name and its PNG."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as started, tempfile.TemporaryDirectory() as folder:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for shot in wanted:
            context = browser.new_context(viewport={"width": shot.width, "height": HEIGHT}, color_scheme=shot.scheme)
            page = context.new_page()
            written = write_page(shot.histories[0], Path(folder) / "page.html", others=shot.histories[1:])
            page.goto(written.as_uri())
            page.locator("html[data-state=drawn]").wait_for(state="attached")
            page.emulate_media(media=shot.media)
            shot.act(page)
            yield shot.name, page.screenshot(full_page=shot.whole)
            context.close()
        browser.close()


def many_layers(num_blocks: int = 166, num_rows: int = 200) -> RunHistory:
    """A made-up run of 1,000 layers whose block 90 explodes."""
    rng = np.random.default_rng(0)
    kinds = ("norm.weight", "norm.bias", "attn.weight", "attn.bias", "mlp.weight", "mlp.bias")
    names = ["embed.weight", *(f"blocks.{block}.{kind}" for block in range(num_blocks) for kind in kinds)]
    names += ["norm.weight", "head.weight", "head.bias"]
    steps = 10 * np.arange(1, num_rows + 1)
    values = {"gradwatch/grad_norm": np.ones(num_rows), "gradwatch/grad_norm_max": np.ones(num_rows)}
    for place, name in enumerate(names):
        norm = 10 ** (-place / 500 + 0.1 * rng.normal(size=num_rows))
        if name.startswith("blocks.90."):
            norm[120:124] *= 1e4
        key = name.replace(".", "/")
        values |= {f"grad_norm/{key}": norm, f"grad_norm_max/{key}": norm * (1 + rng.random(num_rows))}
        values |= {f"num_nonfinite/{key}": np.where((steps == 1230) & (name == "blocks.90.mlp.weight"), 7.0, 0.0)}
    loss = 2 + np.exp(-np.arange(1.0, 10 * num_rows + 1) / 300)
    return RunHistory(
        path=Path("run-layers.wandb"),
        run_id="layers",
        name="a thousand layers",
        steps=steps,
        values=values,
        config={"gradwatch": {"names": names}},
        own={"loss": OwnSeries(np.arange(1.0, 10 * num_rows + 1), loss)},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
