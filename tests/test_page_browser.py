"""The local page in a real browser: drawing, no errors, pointer and keyboard, and no execution of text in names."""

from __future__ import annotations

import csv
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import BROKEN, INCIDENTS, write_fake_run

from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._measure.columns import NUM_BINS, bins_of
from wandb_gradwatch._page.history import HistogramSeries, OwnSeries, RecordedTable, RunHistory, Samples
from wandb_gradwatch._page.page import write_page
from wandb_gradwatch._page.read import read_run
from wandb_gradwatch._page.serve import PageServer
from wandb_gradwatch.snapshot import keys

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
HOSTILE = "</script><img src=x onerror=alert(1)><b>bold</b>\u202e"


def norms_of(history: RunHistory) -> np.ndarray:
    """The largest norm of each layer in each row: [R, P]."""
    return np.stack([history.first_of(f"grad_norm_max/{name}") for name in history.names], axis=1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # Containers have no user namespaces for its sandbox; the page is ours and on this disk.
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> RunHistory:
    return read_run(write_fake_run(tmp_path_factory.mktemp("run")))


def run_of(values: dict[str, Any], steps: object = (10, 20), **more: Any) -> RunHistory:
    """A run of these rows."""
    return RunHistory(Path("run-x.wandb"), more.pop("run_id", "x"), np.asarray(steps, dtype=int), values, **more)


Opener = Callable[..., Any]


class Tabs:
    """A browser's tabs, empty or in use: a new one takes as long as to draw a page."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._empty: dict[bool, list[Any]] = {False: [], True: []}  # without and with fingers
        self._used: list[tuple[bool, Any]] = []
        self.complaints: list[str] = []

    def take(self, *, has_touch: bool) -> Any:
        tab = self._empty[has_touch].pop() if self._empty[has_touch] else self._new(has_touch)
        self._used.append((has_touch, tab))
        return tab

    def _new(self, has_touch: bool) -> Any:
        tab = self._browser.new_context(has_touch=has_touch).new_page()
        complain = self.complaints.append
        tab.on("console", lambda message: message.type == "error" and complain(message.text))
        tab.on("pageerror", lambda error: complain(str(error)))
        tab.on("dialog", lambda dialog: (complain(f"dialog {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda request: _is_local(request.url) or complain(f"request {request.url}"))
        return tab

    def give_back(self) -> None:
        for has_touch, tab in self._used:
            tab.mouse.move(0, 0)
            tab.goto("about:blank")
            self._empty[has_touch].append(tab)
        self._used.clear()


@pytest.fixture(scope="module")
def tabs(browser: Any) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def show(tabs: Tabs, tmp_path: Path) -> Iterator[Opener]:
    """Open the page of a history; afterwards fail on any error, dialog or request that left the page."""
    tabs.complaints.clear()

    def open_page(
        history: RunHistory,
        *,
        width: int = 1400,
        scheme: str = "light",
        has_touch: bool = False,
        unfolded: bool = True,
        **options: Any,
    ) -> Any:
        page = tabs.take(has_touch=has_touch)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(write_page(history, tmp_path / "page.html", **options).as_uri())
        page.locator("html[data-state=drawn]").wait_for(state="attached")
        if unfolded:
            page.evaluate(f"document.querySelectorAll('#more').forEach((one) => (one.open = true)); {TWO_FRAMES}")
        return page

    yield open_page
    tabs.give_back()
    assert tabs.complaints == []


def _is_local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:"))


@contextmanager
def repainted(page: Any, selector: str) -> Iterator[None]:
    """Fail unless a canvas shows something else afterwards."""
    before = pixels(page, selector)
    yield
    assert pixels(page, selector) != before, f"{selector} did not change"


def pixels(page: Any, selector: str) -> str:
    """What a canvas shows when one looks at it: what is out of sight is drawn when it comes into view."""
    # Found anew after the frames: a chart that is drawn may have another canvas.
    page.evaluate("selector => document.querySelector(selector).scrollIntoView({ block: 'nearest' })", selector)
    page.evaluate(TWO_FRAMES)
    return str(page.evaluate("selector => document.querySelector(selector).toDataURL()", selector))


def colours(page: Any, selector: str) -> int:
    """Number of different opaque colours of a canvas that one looks at: 0 or 1 is blank."""
    pixels(page, selector)  # which waits until it is drawn
    return colours_now(page, selector)


def colours_now(page: Any, selector: str) -> int:
    return int(
        page.locator(selector).first.evaluate(
            "canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
            ".data.buffer)).size - 1"
        )
    )


CARDS = ("incidents", "norm", "layers", "histogram", "quantiles", "dead", "nonfinite", "scale", "spread", "overhead")


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
def test_every_picture_is_drawn_and_nothing_is_wider_than_the_window(
    show: Opener, history: RunHistory, width: int, scheme: str
) -> None:
    page = show(history, width=width, scheme=scheme)
    for card in (*CARDS, "own"):
        assert colours(page, f"#{card} canvas") > 3, card
        has_words = card != "incidents"
        assert page.locator(f"#{card} .words p").count() == 2 * has_words, f"{card} lacks its words"
        assert page.locator(f"#{card} .words p:visible").count() == 0  # they are shown on demand
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # The worst is first; the numbers are those of the flags, in the order of the steps.
    assert page.locator(".incident strong").all_inner_texts() == [one.headline for one in INCIDENTS[::-1]]
    assert page.locator(".incident .flag").all_inner_texts() == ["2", "1"]
    assert page.locator(".verdict").text_content() == history.verdict.sentence + "."


def test_a_blank_canvas_would_be_noticed(show: Opener, history: RunHistory) -> None:
    page = show(history)
    assert colours(page, "#norm canvas") > 1
    page.locator("#norm canvas").first.evaluate("canvas => canvas.getContext('2d').reset()")
    assert colours_now(page, "#norm canvas") <= 1


def test_the_nan_is_red_in_the_picture_of_all_layers(show: Opener, history: RunHistory) -> None:
    page = show(history)
    red = (
        "canvas => new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)"
        ".filter(pixel => pixel === 0xff3f00e8).length"  # --nonfinite, #e8003f, as ABGR
    )
    assert page.locator("#layers .frame canvas").first.evaluate(red) > 10  # one step of one layer
    healthy = replace(
        history, values={key: value for key, value in history.values.items() if not key.startswith("num_nonfinite")}
    )
    assert show(healthy).locator("#layers .frame canvas").first.evaluate(red) == 0


def test_a_loss_that_explodes_between_two_rows_is_seen_at_first_sight(show: Opener) -> None:
    # Rows of gradients every 10 steps; the loss of every step is 2.5, but 197,486 at step 155 and NaN from 156 to 159.
    loss = np.full(300, 2.5)
    loss[154], loss[155:159] = 197_486.0, np.nan
    rows = np.arange(10, 301, 10)
    own = {"loss": OwnSeries(np.arange(1.0, 301), loss)}
    page = show(run_of({"gradwatch/grad_norm": np.ones(30)}, rows, own=own))
    # The rows of pixels in the line's colour, and the columns that are marked, as shares of the plot's size.
    pixels(page, "#own .frame canvas")
    drawn = page.locator("#own .frame canvas").first.evaluate(
        """canvas => {
          const [left, top, width, height] = [62, 18, canvas.width - 84, canvas.height - 46];
          const image = canvas.getContext("2d").getImageData(left, top, width, height).data;
          const style = getComputedStyle(document.querySelector("#own .legend-entry .swatch"));
          const swatch = style.backgroundColor.match(/[0-9]+/g).map(Number);
          const ys = [], xs = [];
          for (let pixel = 0; pixel < width * height; pixel++) {
            const is = (colour) => colour.every((part, index) => Math.abs(image[4 * pixel + index] - part) < 12);
            if (is(swatch)) ys.push(Math.floor(pixel / width) / height);
            if (is([0xe8, 0x00, 0x3f])) xs.push((pixel % width) / width);
          }
          return [Math.min(...ys), Math.max(...ys), Math.min(...xs), Math.max(...xs)];
        }"""
    )
    # Log axis 1 to 10^6: the peak stands at log10(197486) / 6 = 88 % of the height, the calm loss at 7 %.
    assert drawn[0] < 0.2
    assert drawn[1] > 0.85
    assert drawn[2] == pytest.approx(155.5 / 300, abs=0.01)
    assert drawn[3] == pytest.approx(159.5 / 300, abs=0.01)
    assert page.locator("#run canvas").first.bounding_box()["y"] < 450  # the strip is among the first 900 pixels


def open_everything(page: Any) -> None:
    """Open what is folded, and wait until it is drawn."""
    page.evaluate(f"document.querySelectorAll('details').forEach((one) => (one.open = true)); {TWO_FRAMES}")


@pytest.fixture(scope="module")
def few(history: RunHistory) -> RunHistory:
    """Its first rows: more of them are more of the same to axe."""
    table = replace(history.flight_recorder, rows=history.flight_recorder.rows[:5])
    return replace(beginning(history, 5), flight_recorder=table, finished=True)


# Colours do not depend on the width, nor does the layout on colours.
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_axe_finds_nothing_on_a_run_and_on_runs_side_by_side(
    show: Opener, few: RunHistory, width: int, scheme: str
) -> None:
    pages = [show(few, width=width, scheme=scheme), show(few, width=width, scheme=scheme, others=[few])]
    open_everything(pages[0])
    for page in pages:
        assert violations(page) == []


def test_axe_would_find_a_picture_without_a_name(show: Opener, few: RunHistory) -> None:
    page = show(few)
    page.locator("#layers .frame canvas").first.evaluate("canvas => canvas.removeAttribute('aria-label')")
    assert [rule for rule, _ in violations(page)] == ["role-img-alt"]


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """What axe-core complains of: the rule, and where."""
    axe = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    return [(one["id"], [str(node["target"]) for node in one["nodes"]][:5]) for one in found]


def saved(page: Any, card: str, kind: str, tmp_path: Path) -> tuple[str, Path]:
    """The name and the content of what a picture can be taken away as."""
    with page.expect_download() as waiting:
        page.locator(f"#{card} .export", has_text=kind).first.click()
    waiting.value.save_as(tmp_path / kind)
    return waiting.value.suggested_filename, tmp_path / kind


def table_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def hover(page: Any, selector: str, across: float, down: float) -> None:
    """Move the pointer to shares of a canvas, or of a chart's plot: "#norm plot"."""
    card = selector.removesuffix(" plot")
    target = page.locator(f"{card} .frame canvas" if selector.endswith(" plot") else selector).first
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    left, right = (62, 22) if selector.endswith(" plot") else (0, 0)  # the axis, and the margin
    page.mouse.move(box["x"] + left + across * (box["width"] - left - right), box["y"] + down * box["height"])


def test_pointer_and_keyboard_give_a_lines_value_and_step(show: Opener, history: RunHistory) -> None:
    page = show(history)
    tooltip = page.locator("#norm .tooltip").first
    hover(page, "#norm plot", 0.999, 0.5)
    at_end = tooltip.inner_text().split("\n")
    assert at_end[0].startswith("step 400")
    value = float(at_end[1].removeprefix("before clipping: "))
    assert value == pytest.approx(history.values["gradwatch/grad_norm"][-1], rel=6e-3)
    hover(page, "#norm plot", 0.5, 0.5)
    assert tooltip.inner_text().split("\n") != at_end
    page.locator("#norm .frame canvas").first.focus()
    for key in ("Home", "ArrowRight"):
        page.keyboard.press(key)
    assert tooltip.inner_text().startswith("step 2")
    page.keyboard.press("Tab")
    assert not tooltip.is_visible()


def test_hovering_over_a_cell_names_layer_step_and_value(show: Opener, history: RunHistory) -> None:
    page = show(history)
    hover(page, "#layers .frame canvas", 0.6, 0.5)
    tooltip = page.locator("#layers .tooltip").first
    assert tooltip.is_visible()
    name, step, value = tooltip.inner_text().split("\n")[:3]
    names = history.spelled(history.names)
    assert name in names
    at, window = step.removeprefix("step ").split(" of steps ")
    at = at.partition(" · ")[0]  # W&B's own step follows
    row = int(np.searchsorted(history.steps, int(at)))
    assert window == f"{history.steps[row] - 9}–{history.steps[row]}, 10 measured"
    expected = norms_of(history)[row, names.index(name)]
    # Three digits are shown, and storing costs at most 0.05 %.
    assert float(value.removeprefix("largest norm of the window: ")) == pytest.approx(expected, rel=6e-3)


def test_the_keyboard_walks_over_cells_and_adds_a_layer(show: Opener, history: RunHistory) -> None:
    page = show(history)
    page.locator("#layers button", has_text="Clear lines").click()
    page.locator("#layers .frame canvas").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    before = page.locator("#layers .readout").first.inner_text()
    assert "step 400" in before
    page.keyboard.press("ArrowLeft")
    assert "step 390" in page.locator("#layers .readout").first.inner_text()
    page.keyboard.press("ArrowUp")
    name = page.locator("#layers .readout").first.inner_text().split(" · ")[0]
    assert name != before.split(" · ")[0]
    page.keyboard.press("Enter")
    assert page.locator("#layers .legend-label").all_inner_texts() == [name]
    page.keyboard.press("Escape")
    assert not page.locator("#layers .tooltip").first.is_visible()


def test_a_drag_zooms_every_picture_and_a_button_leads_back(show: Opener, history: RunHistory) -> None:
    page = show(history)
    norm, layers, histogram = (repainted(page, f"#{card} canvas") for card in ("norm", "layers", "histogram"))
    with norm, layers, histogram:
        hover(page, "#dead plot", 0.4, 0.5)
        page.mouse.down()
        hover(page, "#dead plot", 0.8, 0.5)
        page.mouse.up()
    low, high = (int(field.input_value()) for field in page.locator(".range input").all())
    # The axis goes from 0.5 to 400.5: 40 % and 80 % of it, to a pixel's width.
    assert (low, high) == (pytest.approx(160, abs=3), pytest.approx(320, abs=3))
    page.get_by_role("button", name="Whole run").click()
    assert [field.input_value() for field in page.locator(".range input").all()] == ["1", "400"]


def touch(page: Any, selector: str, *moves: list[tuple[float, float]]) -> None:
    """Put fingers on a picture, move them, and lift them; places are shares of its width and height."""
    target = page.locator(selector).first
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    client = page.context.new_cdp_session(page)
    for kind, fingers in zip(("touchStart", *["touchMove"] * (len(moves) - 1)), moves, strict=True):
        points = [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]} for x, y in fingers]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    client.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.parametrize("picture", ["#norm .frame canvas", "#layers .frame canvas"])
def test_two_fingers_stretch_the_steps_and_one_reads_values(show: Opener, history: RunHistory, picture: str) -> None:
    page = show(history, width=400, has_touch=True)
    low, high = page.locator(".range input").all()
    touch(page, picture, [(0.6, 0.4)], [(0.7, 0.4)])
    card = picture.split()[0]
    assert "step " in page.locator(f"{card} .tooltip").first.inner_text()
    assert (low.input_value(), high.input_value()) == ("1", "400")
    touch(page, picture, [(0.6, 0.4), (0.7, 0.5)], [(0.5, 0.4), (0.9, 0.5)], [(0.4, 0.4), (0.95, 0.5)])
    assert 1 < int(low.input_value()) < int(high.input_value()) < 400


def test_a_tap_on_a_row_reads_it_and_adds_its_line(show: Opener, history: RunHistory) -> None:
    page = show(history, width=400, has_touch=True)
    page.locator("#layers button", has_text="Clear lines").tap()
    page.locator("#layers .frame canvas").first.tap(position={"x": 250, "y": 22})
    name = page.locator("#layers .tooltip .strong").inner_text()
    assert page.locator("#layers .legend-label").all_inner_texts() == [name]


def test_a_click_on_a_row_adds_its_line_and_another_takes_it_away(show: Opener, history: RunHistory) -> None:
    page = show(history)
    page.locator("#layers button", has_text="Clear lines").click()
    canvas = page.locator("#layers .frame canvas").first
    labels = page.locator("#layers .legend-label")
    for expected in ([BROKEN], []):  # the layer that changed most
        canvas.click(position={"x": 600, "y": 20})  # the first row begins at 18
        assert labels.all_inner_texts() == expected


def test_steps_typed_into_the_toolbar_are_shown(show: Opener, history: RunHistory) -> None:
    page = show(history)
    with repainted(page, "#norm canvas"):
        page.locator(".range input").first.fill("200")
        page.locator(".range input").first.press("Enter")


@pytest.mark.parametrize(
    ("card", "buttons", "canvases"),
    [
        ("norm", ("Linear", "Log"), ("#norm canvas",)),
        (
            "layers",
            ("Grad / param", "Dead", "Non-finite", "Largest norm", "Norm"),
            ("#layers .frame canvas", "#layers .chart canvas"),
        ),
    ],
)
def test_a_scale_and_a_metric_are_chosen_by_buttons(
    show: Opener, history: RunHistory, card: str, buttons: tuple[str, ...], canvases: tuple[str, ...]
) -> None:
    page = show(history)
    for button in buttons:
        with ExitStack() as drawn:
            for canvas in canvases:
                drawn.enter_context(repainted(page, canvas))
            page.locator(f"#{card}").get_by_role("button", name=button, exact=True).click()


def test_layers_are_coloured_by_change_and_on_a_switch_by_value(show: Opener, history: RunHistory) -> None:
    page = show(history)
    for colours_by, says_how_often in (("By value", False), ("Against its usual", True)):
        with repainted(page, "#layers .frame canvas"):
            page.locator("#layers").get_by_role("button", name=colours_by).click()
        hover(page, "#layers .frame canvas", 0.6, 0.5)
        assert ("times the layer's usual" in page.locator("#layers .tooltip").first.inner_text()) == says_how_often


def test_the_most_changed_layers_come_first_and_a_broken_one_before_all(show: Opener, history: RunHistory) -> None:
    page = show(history)
    page.locator("#layers").get_by_role("button", name="Most changed").click()
    canvas = "#layers .frame canvas"
    height = page.locator(canvas).first.bounding_box()["height"]
    hover(page, canvas, 0.6, 21 / height)
    assert page.locator("#layers .tooltip").first.inner_text().split("\n")[0] == BROKEN


def test_the_distribution_of_another_layer(show: Opener, history: RunHistory) -> None:
    page = show(history)
    assert page.locator("#histogram option:checked").inner_text() == BROKEN  # the most remarkable at first
    with repainted(page, "#histogram canvas"):
        page.locator("#histogram select").select_option(label="head.weight")
    hover(page, "#histogram canvas", 0.5, 0.45)
    assert page.locator("#histogram .tooltip").inner_text().startswith("head.weight")


def histograms_of(*columns: list[float]) -> RunHistory:
    """Histograms of these elements of one layer, every ten steps."""
    counts = np.stack([np.bincount(bins_of(np.array(one)), minlength=NUM_BINS) for one in columns])
    low, high = (np.array([end(one) for one in columns]) for end in (min, max))
    series = HistogramSeries(np.arange(10, 10 * len(columns) + 1, 10), low, high, counts)
    rows = np.ones(len(columns))
    values = {"gradwatch/grad_norm": rows, "grad_norm/a": rows}
    return run_of(values, series.steps, histograms={"a": series})


def test_a_distribution_has_sizes_percentiles_and_a_cross_section(show: Opener, tmp_path: Path) -> None:
    # Of |g| 40 % are 0, 40 % lie in the bin from 0.5 to 0.75 and 20 % in that from 1 to 1.5: the median lies a quarter
    # of the way in the first, the 75th percentile 0.35 / 0.4 of it, and the 99th 0.95 of the way in the second.
    even = [0.0] * 4 + [0.5, 0.6, 0.7, 0.7499] + [-1.0, -1.4999]
    page = show(histograms_of(even, even, [0.0]))
    head, first, _, last = table_of(saved(page, "histogram", "CSV", tmp_path)[1])
    assert head == ["step", *(f"{name} of |g|" for name in ("99th percentile", "75th", "median", "25th"))]
    # Shares are kept as bytes of their roots: half a step is 0.4 % of them.
    assert [float(cell) for cell in first[:4]] == pytest.approx([10, 1.475, 0.7187, 0.5625], rel=0.01)
    assert first[4] == ""
    assert last == ["30", "", "", "", ""]
    assert page.locator("#histogram .legend-entry").all_inner_texts() == [
        *("99th percentile", "75th", "median", "25th")
    ]
    hover(page, "#histogram .frame canvas", 0.3, 0.5)
    lines = page.locator("#histogram .tooltip").inner_text().split("\n")
    assert "of the elements larger than" in lines[2]
    assert lines[3].startswith("99th percentile 1.4")
    assert lines[3].endswith(", 40 % are 0")
    assert lines[4] == "from -1.5 to 0.75"


@pytest.mark.parametrize(
    ("elements", "median"),
    [
        ([0.0], "–"),
        ([2.0], "2"),
        ([-2.0, -2.5], "2.25"),  # evenly from 2 to 2.5, as the bin's other elements are beyond the extremes
        ([1e30, 1e30], "1.00e30"),  # in the open bin
        ([1e-30], "1.00e-30"),
    ],
)
def test_histograms_of_one_sign_or_of_zeros_alone_are_drawn(show: Opener, elements: list[float], median: str) -> None:
    page = show(histograms_of(elements, elements))
    hover(page, "#histogram .frame canvas", 0.5, 0.2)
    shown = page.locator("#histogram .tooltip").inner_text()
    assert shown.split("median ")[1].split("\n")[0].split(",")[0] == median


def test_a_distribution_is_as_smooth_as_its_elements(show: Opener) -> None:
    """Bins that are shared out anew, as those of a W&B histogram, make stairs and dents where there are none."""
    rng = np.random.default_rng(0)
    page = show(histograms_of(rng.standard_normal(200_000).tolist()))
    # Darkness from the top to the bottom of the first column: it rises to the fullest size, and falls after it.
    dark = page.locator("#histogram .frame canvas").first.evaluate(
        "canvas => { const { data, width } = canvas.getContext('2d').getImageData(62, 20, canvas.width - 260, 250);"
        "const column = Array.from({ length: width }, (_, x) => x).find((x) => data[4 * (width * 125 + x) + 3] > 0);"
        "return Array.from({ length: 250 }, (_, y) => 765 - [0, 1, 2].reduce((sum, part) =>"
        "  sum + data[4 * (width * y + column) + part], 0)); }"
    )
    steps = np.diff(dark)
    fullest = int(np.argmax(dark))
    assert 20 < fullest < 230
    assert (steps[:fullest] >= -6).all()
    assert (steps[fullest:] <= 6).all()
    assert np.abs(steps).max() < 40


FULL = Incident(
    *("exploding_gradient", "Exploding gradient", "WARN", 120, 121, 140, "the norm is 12 times the usual one"),
    unmeasured_from=111,
    cause="learning_rate",
    cause_text="learning rate too high",
    rival="bad_batch",
    rival_text="one bad batch",
    evidence="it rose tenfold at step 119",
    advice="lower it",
    remedy="look at its schedule",
    layers=(Layer("head.weight", 7.5, 0.5), Layer(BROKEN, 3.0), Layer("of.another.model", 2.0)),
    values={"loss": 2.5},
    rank=3,
)


@pytest.mark.parametrize("width", [1400, 400])
def test_an_incident_is_told_with_its_parts(show: Opener, history: RunHistory, width: int) -> None:
    page = show(replace(history, incidents=(FULL,)), width=width)
    card = page.locator(".incident")
    assert card.locator("strong").inner_text() == "Step 120: learning rate too high, or one bad batch. Lower it."
    assert card.locator(".fact").text_content() == FULL.fact
    assert card.locator(".level").inner_text() == "WARN"
    assert "seen until step 140, on rank 3" in card.locator(".links").inner_text()
    assert not card.locator("dl").is_visible()
    card.locator("summary").click()
    assert card.locator("dt").all_inner_texts() == ["Not measured", "Layers", "Evidence", "Remedy"]
    told = card.locator("dd").all_text_contents()
    assert told[0] == "steps 111–119, in which it may have begun"
    assert told[2:] == [FULL.evidence, FULL.remedy]
    assert [row.split("\t") for row in card.locator("tr").all_inner_texts()] == [
        *(
            ["layer", "value", "usual"],
            ["head.weight", "7.5", "0.5"],
            [BROKEN, "3", "–"],
            ["of.another.model", "2", "–"],
        )
    ]
    layers = card.locator(".scroll")
    assert layers.evaluate("node => node.scrollWidth <= node.clientWidth")  # numbers are in sight
    card.get_by_role("button", name="show 2 layers").click()
    assert page.locator("#layers .legend-label").all_inner_texts() == ["head.weight", BROKEN]


def test_a_strip_has_the_ten_steps_before_an_incident_to_the_thirty_after(show: Opener, history: RunHistory) -> None:
    page = show(history)
    canvas, tooltip = (page.locator(f"#incident-2 {part}").first for part in ("canvas", ".tooltip"))  # of step 265
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    told = {}
    for step in range(255, 296):
        page.keyboard.press("Home" if step == 255 else "ArrowRight")
        first, *values = tooltip.inner_text().split("\n")
        told[first.partition(" · ")[0]] = dict(value.split(": ", 1) for value in values)
    page.keyboard.press("ArrowRight")
    assert tooltip.inner_text().startswith("step 295")  # the last
    assert list(told) == [f"step {step}" for step in range(255, 296)]
    norms = dict(zip(history.samples.steps.tolist(), history.samples.norms.tolist(), strict=True))
    assert float(told["step 262"]["gradient norm before clipping"]) == pytest.approx(norms[262], rel=6e-3)
    assert told["step 265"]["gradient norm before clipping"].endswith("of the finite rest, 12 NaN or Inf")
    assert told["step 265"][BROKEN] == "NaN or Inf"
    # The received norm is kept for the flight recorder's steps, 261 to 270, and for the last step of each row.
    known = [step for step, values in told.items() if values["gradient norm received"] != "not kept"]
    assert known == [f"step {step}" for step in (260, *range(261, 271), 280, 290)]
    assert float(told["step 262"]["gradient norm received"]) == pytest.approx(2.0, rel=6e-3)  # the limit


def test_the_five_layers_that_changed_most_have_rows_that_can_be_read(show: Opener, history: RunHistory) -> None:
    page = show(history)  # 76 layers, of which each would have nine pixels
    height = page.locator("#layers .frame canvas").first.bounding_box()["height"]
    names = []
    for row in range(5):
        for part in (0.1, 0.9):
            hover(page, "#layers .frame canvas", 0.6, (18 + 15 * (row + part)) / height)
            names.append(page.locator("#layers .tooltip").first.inner_text().split("\n")[0])
    assert names[::2] == names[1::2]
    assert len(set(names)) == 5
    assert names[0] == BROKEN
    assert sorted(page.locator("#layers .legend-label").all_inner_texts()) == sorted(set(names))  # drawn below, too


def test_an_incident_of_which_little_is_known_says_no_more(show: Opener, history: RunHistory) -> None:
    known = Incident("mine", "My rule", "INFO", 7, 7, 7, "", recovered_step=9)
    page = show(replace(history, incidents=(known,)))
    assert page.locator(".incident .links").inner_text().split("\n") == [
        *("INFO", "last seen at step 7, usual again at step 9", "zoom to step 7", "copy as text", "copy as JSON")
    ]
    assert page.locator(".incident :is(dt, .fact)").count() == 0


def test_an_incident_is_copied_as_text_and_as_json(show: Opener, history: RunHistory) -> None:
    page = show(replace(history, incidents=(FULL,)))
    copied = "new Promise((done) => (navigator.clipboard.writeText = async (text) => done(text)))"
    for kind in ("text", "JSON"):
        page.evaluate(f"window.copied = {copied}, undefined")
        page.get_by_role("button", name=f"copy as {kind}").click()
        text = page.evaluate("window.copied")
        page.get_by_role("button", name=f"copied as {kind}").wait_for()
        if kind == "text":
            assert text == FULL.text
        else:
            assert Incident.from_dict(json.loads(text)).to_dict() == FULL.to_dict()


def test_a_browser_that_refuses_to_copy_says_so(show: Opener, history: RunHistory) -> None:
    page = show(replace(history, incidents=(FULL,)))
    page.evaluate("() => { navigator.clipboard.writeText = async () => { throw new Error('refused'); }; }")
    page.get_by_role("button", name="copy as text").click()
    page.get_by_role("button", name="the browser refuses to copy").wait_for()


def test_an_incident_leads_to_its_step(show: Opener, history: RunHistory) -> None:
    page = show(history)
    with repainted(page, "#norm canvas"):
        page.get_by_role("button", name="step 265").click()
    low, high = (int(field.input_value()) for field in page.locator(".range input").all())
    assert low < 265 < high
    assert high - low < 100


# The pixels of a chart between two of the steps 1 to 100.
PIXELS_BETWEEN = """(canvas, [from, to]) => {
  const [left, width] = [62, canvas.width - 84];
  const [x0, x1] = [from, to].map((step) => Math.round(left + ((step - 0.5) / 100) * width));
  return [...canvas.getContext("2d").getImageData(x0, 18, x1 - x0, canvas.height - 46).data].join();
}"""


def pixels_between(page: Any, places: list[tuple[int, int]]) -> list[str]:
    pixels(page, "#norm canvas")  # which waits until it is drawn
    return [page.locator("#norm canvas").first.evaluate(PIXELS_BETWEEN, place) for place in places]


@pytest.mark.parametrize(("recovered", "changes"), [(None, [False, True, False, True, False]), (60, [0, 1, 0, 0, 0])])
def test_an_incident_colours_the_measured_steps_at_which_it_was_there(
    show: Opener, recovered: int | None, changes: list[bool]
) -> None:
    measured = np.r_[1:31, 61:101]
    run = run_of({"gradwatch/grad_norm": np.ones(2)}, [30, 100], listed=Samples(measured, np.ones(70), 0 * measured))
    there = Incident("mine", "My rule", "ERROR", 10, 10, 80, "a fact", recovered_step=recovered)
    places = [(1, 9), (11, 30), (32, 59), (62, 80), (82, 99)]
    before, after = (pixels_between(show(one), places) for one in (run, replace(run, incidents=(there,))))
    assert [one != other for one, other in zip(before, after, strict=True)] == [bool(one) for one in changes]


def test_a_nan_is_marked_at_its_measured_step_alone(show: Opener) -> None:
    measured = np.r_[1, 20:101:20, 100]
    places = [(22, 38), (38, 42), (42, 58)]
    drawn = []
    for bad in (np.zeros(7), np.where(measured == 40, 3, 0)):
        listed = Samples(measured, np.ones(7), bad)
        page = show(run_of({"gradwatch/grad_norm": np.ones(2)}, [20, 100], listed=listed))
        drawn.append(pixels_between(page, places))
    assert [one != other for one, other in zip(*drawn, strict=True)] == [False, True, False]


def test_the_theme_button_repaints_everything(show: Opener, history: RunHistory) -> None:
    page = show(history)
    with repainted(page, "#norm canvas"), repainted(page, "#layers .frame canvas"):
        page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 20)"


COUNT_PAINTINGS = """() => {
  const scale = CanvasRenderingContext2D.prototype.scale;
  CanvasRenderingContext2D.prototype.scale = function (...all) {
    window.paintings++;
    scale.apply(this, all);
  };
}"""


def test_pictures_are_drawn_once_per_frame_and_only_in_sight_or_for_print(show: Opener, history: RunHistory) -> None:
    page = show(history)
    num_frames = page.locator(".frame").count()  # as each scales its canvas once
    page.evaluate(COUNT_PAINTINGS)

    def paintings(act: str) -> int:
        page.evaluate(f"window.paintings = 0; {act}; {TWO_FRAMES}")
        return int(page.evaluate("window.paintings"))

    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    paintings("1")  # what is near is drawn
    assert page.locator("#layers").bounding_box()["y"] < -1200  # far from the window
    assert paintings("document.querySelector('#theme').click()") < num_frames / 2
    assert paintings("document.querySelector('#layers .frame').scrollIntoView()") >= 1
    # Three changes before the next frame are one drawing of what is near, which is not everything.
    once = paintings("document.querySelector('#theme').click()")
    thrice = paintings("for (let time = 0; time < 3; time++) document.querySelector('#theme').click()")
    assert 0 < once == thrice < num_frames


PAINTED = """() => [...document.querySelectorAll(".printed")].map((image) => {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: image.naturalWidth, height: image.naturalHeight });
  canvas.getContext("2d").drawImage(image, 0, 0);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
})"""


def test_before_printing_each_canvas_becomes_an_image_and_afterwards_the_page_is_as_before(
    show: Opener, history: RunHistory
) -> None:
    page = show(history, unfolded=False)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    sheet = 680
    page.locator(".printed").last.evaluate("image => image.decode()")
    assert page.locator(".printed").count() == page.locator(".frame").count()
    assert min(page.evaluate(PAINTED)) > 3
    assert page.locator("#histogram .printed").bounding_box()["width"] == pytest.approx(sheet, abs=60)
    assert page.locator("canvas:visible, .controls:visible, .toolbar:visible").count() == 0
    paper = 1040  # pixels of A4, in which no card is cut
    heights = page.locator(".card:not(#incidents), .incident").evaluate_all("all => all.map((one) => one.offsetHeight)")
    assert max(heights) < paper
    page.evaluate(f"dispatchEvent(new Event('afterprint')); {TWO_FRAMES}")
    assert page.locator("#layers .frame canvas").first.evaluate("one => one.clientWidth") > sheet
    assert page.locator(".printed, #histogram:visible").count() == 0


def test_pictures_are_in_the_pdf(show: Opener, history: RunHistory, tmp_path: Path) -> None:
    page = show(history, unfolded=False)
    page.pdf(path=tmp_path / "page.pdf", format="A4", print_background=True)
    pictures = images_of((tmp_path / "page.pdf").read_bytes())
    assert len(pictures) == page.locator(".frame").count()
    assert min(map(len, map(set, pictures))) > 3  # different pixels; a blank picture has one
    red = bytes([0xE8, 0x00, 0x3F])
    assert any(red in set(picture) for picture in pictures)  # the NaN, in the picture of all layers


def images_of(pdf: bytes) -> list[list[bytes]]:
    """The pixels of each image of a PDF by Chromium, which compresses them with zlib."""
    found = []
    for head, start in (
        (one.group(1), one.end()) for one in re.finditer(rb"<<([^<>]*/Subtype /Image[^<>]*)>>\s*stream\r?\n", pdf)
    ):
        if b"/DeviceGray" not in head and b"/FlateDecode" in head:
            data = zlib.decompressobj().decompress(pdf[start:])
            found.append([data[place : place + 3] for place in range(0, len(data), 3)])
    return found


def test_a_reloaded_page_keeps_its_view_and_so_does_its_address_elsewhere(show: Opener, history: RunHistory) -> None:
    page = show(history)
    page.locator("#theme").click()
    page.locator("#layers").get_by_role("button", name="Dead").click()
    page.locator("#layers button", has_text="Clear lines").click()
    page.locator("#layers input[type=search]").fill("embed.token")
    page.locator("#layers .frame canvas").first.click(position={"x": 600, "y": 40})
    page.locator("#layers input[type=search]").fill("")
    page.locator(".range input").first.fill("200")
    page.locator(".range input").first.press("Enter")
    address = page.url
    page.reload()
    other = show(history)
    other.goto("about:blank")
    other.goto(address)
    for shown in (page, other):
        shown.locator("html[data-state=drawn]").wait_for(state="attached")
        assert shown.locator(".range input").first.input_value() == "200"
        assert shown.evaluate("document.documentElement.dataset.theme") == "dark"
        assert shown.locator("#layers button[aria-pressed=true]").first.inner_text() == "Dead"
        assert shown.locator("#layers .legend-label").all_inner_texts() == ["embed.token"]


def test_an_address_that_holds_no_view_shows_the_whole_run(show: Opener, few: RunHistory) -> None:
    page = show(few)
    for address in ("#nonsense", "#%7B%22range%22%3A%5B5%2C5%5D%7D", "#%5B1%5D", "#%E0"):
        page.goto(page.url.partition("#")[0] + address)
        page.reload()
        page.locator("html[data-state=drawn]").wait_for(state="attached")
        assert [field.input_value() for field in page.locator(".range input").all()] == ["1", "400"], address


@pytest.mark.parametrize(
    ("card", "name"), [("norm", "Gradient norm of the whole model"), ("layers", "Layers by steps")]
)
def test_a_picture_can_be_taken_away_as_csv_and_as_png(
    show: Opener, history: RunHistory, tmp_path: Path, card: str, name: str
) -> None:
    page = show(history)
    files = [saved(page, card, kind, tmp_path) for kind in ("CSV", "PNG")]
    for (file_name, _), ending in zip(files, ("csv", "png"), strict=True):
        assert file_name.endswith(f"{name.replace(' ', '-')}{'-over-steps' * (card == 'norm')}.{ending}")
    assert files[1][1].read_bytes().startswith(b"\x89PNG")
    head, *rows = table_of(files[0][1])
    if card == "norm":
        assert head == ["step", "before clipping", "received by the optimizer"]
        assert [int(row[0]) for row in rows] == list(range(1, 401))
        found, expected = [float(row[1]) for row in rows[9::10]], history.values["gradwatch/grad_norm"]
    else:  # the columns end with the rows' windows, and at the ten steps that the flight recorder holds
        assert [int(step) for step in head[1:]] == sorted({*history.steps.tolist(), *range(261, 271)})
        rows.sort(key=lambda row: history.spelled(history.names).index(row[0]))
        assert [row[0] for row in rows] == history.spelled(history.names)
        rest = history.steps[:26]
        found = [float(rows[5][head.index(str(step))] or "nan") for step in rest]
        expected = norms_of(history)[:26, 5]
    np.testing.assert_allclose(found, expected, rtol=5e-4)  # what storing costs at most


def test_a_name_that_a_spreadsheet_would_compute_is_a_text_in_the_csv(show: Opener, tmp_path: Path) -> None:
    values = {'grad_norm/=HYPERLINK("x")': np.ones(2), "grad_norm/b": np.ones(2)}
    page = show(run_of(values))
    _, path = saved(page, "layers", "CSV", tmp_path)
    assert """"'=HYPERLINK(""x"")",1,1""" in path.read_text(encoding="utf-8")


def test_hostile_names_stay_text(show: Opener) -> None:
    values = {f"{metric}/{HOSTILE}": np.array([1.0, 2.0]) for metric in ("grad_norm", "dead_ratio")}
    values |= {"gradwatch/grad_norm": np.ones(2), f"activation/{HOSTILE.replace('/', '')}/norm": np.array([1.0, 2.0])}
    more = {
        **dict.fromkeys(("run_id", "name", "project"), HOSTILE),
        "own": {f"{HOSTILE}{place}": OwnSeries(np.array([1.0, 2.0]), np.ones(2)) for place in range(2)},
        "incidents": (
            Incident(
                *(HOSTILE, HOSTILE, "WARN", 10, 10, 10, HOSTILE),
                cause_text=HOSTILE,
                evidence=HOSTILE,
                remedy=HOSTILE,
                layers=(Layer(HOSTILE, 1.0),),
            ),
        ),
        "flight_recorder": RecordedTable(["step", "name", HOSTILE], [[10, HOSTILE, HOSTILE]]),
        "config": {HOSTILE: HOSTILE},
        "notes": (HOSTILE,),
    }
    page = show(run_of(values, **more))
    page.locator(".told summary").click()
    shown = HOSTILE.replace("\u202e", "‹U+202E›")
    hover(page, "#layers .frame canvas", 0.7, 0.4)
    assert page.locator("#layers .tooltip .strong").inner_text() == shown.replace("/", ".")  # as a layer is spelled
    for selector in (
        "h1",
        ".note",
        ".incident strong",
        ".incident dd",
        ".incident td",
        "#settings td",
        "#own .legend-label",
    ):
        assert shown in page.locator(selector).first.inner_text(), selector
    assert "bold" in line_labels(page, "activation")[0]
    assert page.locator("img, main b").count() == 0


def test_what_never_happened_is_said_instead_of_drawn(show: Opener) -> None:
    zeros = np.zeros(2)
    values = {f"gradwatch/{key}": zeros for key in ("num_nan", "num_inf", "clip_ratio", "num_skipped_steps")}
    values |= {"gradwatch/grad_norm": zeros + 1, "gradwatch/grad_scale": zeros + 1024}
    page = show(run_of(values))
    assert page.locator(".never").all_inner_texts() == [
        "No step was clipped.",
        "No element was NaN or Inf.",
        "No step was skipped.",
    ]


@pytest.mark.parametrize("withheld", [0, 2])
def test_withheld_steps_are_shown_where_there_were_any(show: Opener, withheld: int) -> None:
    values = {"gradwatch/grad_norm": np.ones(2), "gradwatch/num_guarded_steps": np.array([0.0, withheld])}
    page = show(run_of(values))
    assert page.get_by_text(f"{withheld} steps withheld by the guard").count() == (1 if withheld else 0)
    assert page.get_by_text("Loss scale, and steps that were not applied").count() == (1 if withheld else 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_rows": 7}, "none of them was logged by wandb_gradwatch. Call wandb_gradwatch.watch(model)"),
        ({"finished": False}, "no history rows yet"),
    ],
)
def test_a_run_without_our_rows_says_what_to_do(show: Opener, more: dict[str, Any], words: str) -> None:
    page = show(run_of({}, (), **more))
    assert words in page.inner_text("#empty")
    assert page.locator("canvas").count() == 0


@pytest.mark.parametrize("steps", [[10], [10, 20], [1000, 1010, 5000, 5010]])
def test_short_runs_and_runs_with_gaps_are_drawn(show: Opener, steps: list[int]) -> None:
    rows = np.arange(1.0, len(steps) + 1)
    values = {"gradwatch/grad_norm": rows, "grad_norm/a": rows, "grad_norm/b": np.full(len(steps), np.nan)}
    page = show(run_of(values, steps))
    assert colours(page, "#norm canvas") > 3
    assert colours(page, "#layers .frame canvas") > 3


def test_values_that_are_zero_infinite_or_missing_everywhere_are_drawn(show: Opener) -> None:
    values = {
        "gradwatch/grad_norm": np.array([0.0, 0.0]),
        "grad_norm/zero": np.array([0.0, 0.0]),
        "grad_norm/infinite": np.array([np.inf, np.inf]),
        "grad_norm/missing": np.array([np.nan, np.nan]),
    }
    page = show(run_of(values))
    canvas = page.locator("#layers .frame canvas").first
    height = canvas.bounding_box()["height"]
    seen = []
    for row in range(3):
        hover(page, "#layers .frame canvas", 0.7, (18 + (row + 0.5) * (height - 46) / 3) / height)
        seen.append(page.locator("#layers .tooltip").first.inner_text().split("\n")[2])
    assert seen == ["gradient norm: Inf", "gradient norm: missing", "gradient norm: 0"]


def test_a_norm_of_zero_has_no_place_on_a_logarithm_and_one_on_a_line(show: Opener) -> None:
    page = show(run_of({"gradwatch/grad_norm": np.zeros(2)}, (9, 10)))
    assert "steps 9–10" in page.locator(".facts span").all_inner_texts()
    hint = page.locator("#norm .hint")
    assert hint.inner_text() == "Nothing is above 0, and a logarithmic scale begins above it."
    page.locator("#norm").get_by_role("button", name="Linear").click()
    assert hint.count() == 0


def test_a_norm_of_the_finite_rest_is_marked_and_not_drawn(show: Opener) -> None:
    steps = np.arange(1, 101)
    bad = np.where(steps == 50, 7, 0)
    run = run_of({"gradwatch/grad_norm": np.ones(100)}, steps, listed=Samples(steps, np.ones(100), bad))
    page = show(run)
    hover(page, "#run canvas", 0.6, 0.5)
    assert "norm before clipping: 1" in page.locator("#run .tooltip").inner_text()
    page.locator("#run canvas").first.focus()
    page.keyboard.press("Home")
    for _ in range(49):
        page.keyboard.press("ArrowRight")
    told = page.locator("#run .tooltip").inner_text()
    assert told.startswith("step 50\n")
    assert "norm before clipping: 1 of the finite rest, 7 NaN or Inf" in told


@pytest.mark.parametrize("scale", ["Log", "Linear"])
def test_values_of_every_size_have_an_axis(show: Opener, scale: str) -> None:
    # The page keeps 7 digits; a float64 gradient, or the user's own loss, may be anywhere.
    values = {"gradwatch/grad_norm": np.array([2e-3, 2e3, 2e34])}
    values |= {"gradwatch/grad_norm_max": np.array([2e-40, 2e-39, 1])}
    page = show(run_of(values, (10, 20, 30)))
    page.locator("#norm").get_by_role("button", name=scale).click()
    left = (  # what is painted left of the plot, where the axis has its labels
        "canvas => { const width = 56;"
        "return new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, width, canvas.height)"
        ".data.buffer)).size - 1 }"
    )
    pixels(page, "#norm canvas")  # which waits until the other scale is drawn
    assert page.locator("#norm canvas").first.evaluate(left) > 3


def test_one_huge_value_does_not_press_a_run_flat(show: Opener) -> None:
    norms = np.where(np.arange(100) % 2, 1.0, 10.0)
    norms[50] = 1e22
    page = show(run_of({"gradwatch/grad_norm": norms}, np.arange(1, 101)))
    pixels(page, "#norm canvas")  # which waits until it is drawn
    # The rows of pixels that the line covers, without the column of the spike: one decade of the axis. It ends at four
    # decades above what nine of ten values stay below, 1e5, not at 1e22, where the decade would have a 22nd.
    covered = page.locator("#norm canvas").first.evaluate(
        """canvas => {
          const [width, height] = [Math.floor((canvas.width - 84) / 3), canvas.height - 46];
          const area = canvas.getContext("2d").getImageData(62, 18, width, height);
          const style = getComputedStyle(document.querySelector("#norm .swatch"));
          const swatch = style.backgroundColor.match(/[0-9]+/g).map(Number);
          const is = (pixel) => swatch.every((part, index) => Math.abs(area.data[4 * pixel + index] - part) < 12);
          const ys = [];
          for (let pixel = 0; pixel < width * height; pixel++) if (is(pixel)) ys.push(Math.floor(pixel / width));
          return (Math.max(...ys) - Math.min(...ys)) / height;
        }"""
    )
    assert covered > 1 / 7


def test_series_of_single_models_and_of_the_cadence_are_drawn(show: Opener) -> None:
    numbers = {"changed_ratio": 0.5, "sample_every": 4.0, "overhead_ratio": 0.01, "grad_norm": 3.0}
    numbers |= {f"{key}/{name}": 2.0 for key in ("grad_norm_total", "grad_norm_total_max") for name in ("G", "D")}
    values = {f"gradwatch/{key}": np.full(2, value) for key, value in numbers.items()}
    page = show(run_of(values))
    assert line_labels(page, "norm") == ["before clipping", "D", "G", "D", "G", "steps changed"]
    assert line_labels(page, "overhead") == ["share of the time since watch()", "sample_every"]
    for canvas in page.locator("#norm canvas, #overhead canvas").all():
        assert canvas.evaluate("node => node.width") > 300


def test_runs_are_a_table_with_the_worst_first_and_two_of_them_side_by_side(show: Opener, history: RunHistory) -> None:
    healthy = replace(history, incidents=(), name="healthy", config={"lr": 0.000123456, "seed": 1})
    values = {key: value[:30].copy() for key, value in history.values.items()}
    name = "blocks.1.mlp.fc.weight"
    values["grad_norm_max/" + name.replace(".", "/")][20:] *= 1e4
    second = replace(healthy, name="other", steps=history.steps[:30], values=values, config={"lr": 1, "seed": 1})
    broken = replace(history, name=HOSTILE, config={"seed": 1, "wandb_api_key": "0123456789abcdef"})
    page = show(healthy, others=[second, broken])
    rows = [row.split("\t") for row in page.locator("#runs tbody tr").all_inner_texts()]
    shown = HOSTILE.replace("\u202e", "‹U+202E›")
    names = [row[1].partition(" (")[0] for row in rows]
    assert names[0] == shown
    assert sorted(names[1:]) == ["healthy", "other"]
    assert page.locator("#runs thead th").all_inner_texts() == [
        *("Run", "Verdict", "Gradient norm", "First incident", "lr", "Measured")
    ]
    assert rows[0][2].startswith("ERROR: the explosion")
    assert rows[0][4] == "step 260 head.weight"
    assert {row[5] for row in rows} == {"not set", "0.0001235", "1"}
    assert page.locator("#runs .spark").count() == 3
    assert page.locator("img, main b").count() == 0
    # At first the worst and the best; then the first and the second.
    boxes = {label: page.get_by_label(f"Compare {label}", exact=True) for label in ("healthy", "other", shown)}
    assert [box.is_checked() for box in boxes.values()].count(True) == 2
    assert boxes[shown].is_checked()
    boxes["healthy"].set_checked(True)
    boxes["other"].set_checked(True)
    assert not boxes[shown].is_checked()
    assert page.locator(".verdict").inner_text().startswith(f"A and B part at step 210: the gradient of {name} is")
    for card in ("strips", "ratio_of_runs"):
        assert colours(page, f"#{card} canvas") > 3, card
    labels = page.locator("#ratio_of_runs .chart .legend-label")
    assert labels.all_inner_texts() == [f"A {name}", f"B {name}"]
    with repainted(page, "#ratio_of_runs .chart canvas"):
        page.locator("#ratio_of_runs .frame canvas").first.click(position={"x": 600, "y": 24})
    assert labels.all_inner_texts() != [f"A {name}", f"B {name}"]


def test_the_ratio_of_two_runs_is_that_of_their_windows(show: Opener) -> None:
    # The second run has windows of 20 steps; the largest of the first run's windows of 10 in each counts.
    first = run_of({"grad_norm_max/a": np.array([1.0, 2.0, 3.0, 8.0])}, [10, 20, 30, 40])
    second = run_of({"grad_norm_max/a": np.array([4.0, 4.0])}, [20, 40])
    page = show(first, others=[second])
    seen = []
    for across in (0.4, 0.95):
        hover(page, "#ratio_of_runs .frame canvas", across, 0.4)
        seen.append(page.locator("#ratio_of_runs .tooltip").first.inner_text().split(": ")[-1])
    assert seen == ["2", "0.5"]


def test_runs_with_nothing_in_common_say_so(show: Opener) -> None:
    one, other = (run_of({f"grad_norm_max/{name}": np.ones(2)}) for name in "ab")
    page = show(one, others=[other])
    assert page.get_by_text("The runs have no layer, or no step, in common.").count() == 1


def test_twenty_runs_are_drawn_and_axe_finds_nothing(show: Opener, few: RunHistory) -> None:
    runs = [replace(few, name=f"run {place}", config={"seed": place}) for place in range(20)]
    page = show(runs[0], others=runs[1:], width=400)
    assert page.locator("#runs .spark").count() == 20
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert violations(page) == []


def beginning(history: RunHistory, num_rows: int) -> RunHistory:
    values = {key: value[:num_rows] for key, value in history.values.items()}
    return replace(
        history, steps=history.steps[:num_rows], times=history.times[:num_rows], values=values, finished=False
    )


def test_a_page_follows_its_run_in_place(browser: Any, history: RunHistory) -> None:
    server = PageServer(beginning(history, 20))
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    try:
        page = context.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: request.url.startswith(server.address) or complaints.append(request.url))
        page.clock.install()  # no test waits for a clock of its own
        page.goto(server.address)
        page.locator("html[data-state=drawn]").wait_for(state="attached")
        assert "newest row at" in page.locator("#age").inner_text()
        page.evaluate(f"document.querySelector('#more').open = true; {TWO_FRAMES}")
        search = page.locator("#layers input[type=search]")
        search.fill("blocks.3 mlp fc")
        page.locator("#layers .frame canvas").first.click(position={"x": 600, "y": 40})
        page.locator("#norm").get_by_role("button", name="Linear").click()
        page.locator(".range input").first.fill("100")
        page.locator(".range input").first.press("Enter")
        search.focus()
        page.evaluate("scrollTo(0, 1200)")
        chosen = page.locator("#layers .legend-label").all_inner_texts()
        below_the_toolbar = (
            "[...document.querySelectorAll('section[id]')].find(one => one.getBoundingClientRect().bottom > 60)"
        )
        at_the_top = page.locator("#" + page.evaluate(f"{below_the_toolbar}.id"))
        top = at_the_top.bounding_box()["y"]
        server.update(beginning(history, 30))
        page.clock.run_for(4000)
        page.locator("html[data-version='2']").wait_for(state="attached")
        assert "30 flushes" in page.locator(".facts").inner_text()
        assert page.locator(".range input").first.input_value() == "100"
        assert search.input_value() == "blocks.3 mlp fc"
        assert search.evaluate("node => node === document.activeElement")
        assert page.locator("#layers .legend-label").all_inner_texts() == chosen
        assert page.locator("#norm button[aria-pressed=true]").first.inner_text() == "Linear"
        assert at_the_top.bounding_box()["y"] == pytest.approx(top, abs=2)
        server.update(history)
        page.clock.run_for(4000)
        page.locator("html[data-version='3']").wait_for(state="attached")
        assert page.locator("#age").count() == 0
        assert complaints == []
    finally:
        context.close()
        server.close()


def line_labels(page: Any, card: str) -> list[str]:
    return list(page.locator(f"#{card} .legend-label").all_inner_texts())


def test_every_family_has_a_card_of_its_own(show: Opener, history: RunHistory) -> None:
    page = show(history)
    for card in keys.METRIC_FAMILIES:
        assert colours(page, f"#{card} .frame canvas") > 3, card
    for card, what, name in (("activation", "Module", "blocks.0.mlp"), ("parameter", "Parameter", "embed.token")):
        assert colours(page, f"#{card}_histogram .frame canvas") > 20
        assert page.locator(f"#{card}_histogram").get_by_label(what, exact=True).input_value() == "0"
        assert page.locator(f"#{card}_histogram option").all_inner_texts() == [name]
    assert line_labels(page, "own") == ["loss"]


def test_another_metric_repaints_its_own_card_only(show: Opener, history: RunHistory) -> None:
    page = show(history)
    of_layers = pixels(page, "#layers .frame canvas")
    with repainted(page, "#activation .frame canvas"):
        page.locator("#activation button", has_text="Mean").click()  # of both signs
    assert "0" in page.locator("#activation .bar-ticks").inner_text()
    assert pixels(page, "#layers .frame canvas") == of_layers


def test_updates_have_the_usual_line(show: Opener, history: RunHistory) -> None:
    page = show(history)
    labels = line_labels(page, "update")
    assert labels[0] == "usual"
    assert len(labels) == 6  # and the five that moved most
    page.locator("#update button", has_text="Norm").click()
    assert "usual" not in line_labels(page, "update")


def test_a_head_that_collapses_is_drawn_at_once_and_rows_add_and_take_away_lines(
    show: Opener, history: RunHistory
) -> None:
    page = show(history)
    assert line_labels(page, "attention")[0] == "blocks.3.attn.head_1"
    page.locator("#attention button", has_text="Clear lines").click()
    assert line_labels(page, "attention") == []
    canvas = page.locator("#attention .frame canvas").first
    canvas.click(position={"x": 600, "y": 24})  # the first row
    assert line_labels(page, "attention") == ["blocks.0.attn.head_0"]
    page.locator("#attention input[type=search]").fill("3 head_2")
    assert "1 of 16 heads" in page.locator("#attention .count").inner_text()
    canvas.click(position={"x": 600, "y": 60})
    assert line_labels(page, "attention") == ["blocks.0.attn.head_0", "blocks.3.attn.head_2"]


def test_a_bad_cell_is_red_and_says_so_in_every_metric(show: Opener, history: RunHistory) -> None:
    page = show(history)
    hover(page, "#activation .frame canvas", 0.67, 0.55)  # the third of four blocks; steps 261 to 270 of 400
    assert "12 NaN or Inf elements" in page.locator("#activation .tooltip").first.inner_text()
