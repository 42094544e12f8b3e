"""The demo: a small GPT learns Python's own source code, its learning rate jumps, and an alert is raised.

It is the smallest realistic use of the package: a plain training script with one additional line. It downloads no data
and needs no W&B account.
"""

import copy
import shutil
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
import wandb
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from ._output import Styled, alert_title, pairs, paragraph, say, styled, title
from ._page.history import RunHistory
from ._page.page import write_page
from ._page.read import read_finished_run
from ._pipeline.dispatcher import near
from ._summary import Summary
from ._watch import watch
from .rules import Alert
from .snapshot import keys

# B sequences in a batch, T bytes in a sequence, D channels, H heads

VOCABULARY: Final = 256  # the model reads bytes
CONTEXT: Final = 64
CHANNELS: Final = 128
HEADS: Final = 4
LAYERS: Final = 4
BATCH: Final = 8
LEARNING_RATE: Final = 0.03  # at 0.1 the norm has spikes that would raise further alerts
MOMENTUM: Final = 0.9
ACCIDENT_FACTOR: Final = 100  # of the learning rate
ACCIDENT_STEPS: Final = 10
LOG_EVERY: Final = 10
MIN_STEPS: Final = 100  # the accident is in the middle, after enough steps for the rules to learn what is normal
DEFAULT_STEPS: Final = 300
PROJECT: Final = "wandb-gradwatch-demo"
RUN_NAME: Final = "a learning-rate accident"
PAGE_NAME: Final = "page.html"


class GPT(nn.Module):
    """Predicts the next byte: [B, T] bytes in, [B, T, VOCABULARY] logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, CHANNELS)
        self.position = nn.Embedding(CONTEXT, CHANNELS)
        block = nn.TransformerEncoderLayer(
            CHANNELS, HEADS, 4 * CHANNELS, dropout=0.0, activation=gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(CHANNELS), enable_nested_tensor=False)
        self.head = nn.Linear(CHANNELS, VOCABULARY)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        length = bytes_BT.shape[1]
        x_BTD = self.embedding(bytes_BT) + self.position.weight[:length]
        is_later_TT = nn.Transformer.generate_square_subsequent_mask(length, device=bytes_BT.device)
        return torch.as_tensor(self.head(self.blocks(x_BTD, is_later_TT, is_causal=True)))


def read_corpus() -> Tensor:
    """Return the concatenated top-level modules of Python's standard library as bytes: 1-D, int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 100 * CONTEXT:
        raise RuntimeError(
            f"the demo reads the standard library's sources, but {folder} holds {len(text)} bytes of them; "
            "run it with a Python that was installed with its sources"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def run_demo(output: Path, *, steps: int = DEFAULT_STEPS, online: bool = False) -> int:
    """Train, write the page, and print what was logged and where to look at it.

    Returns:
        The exit status: 0; 1 if the run's file lacks the rows or the alert; 130 after Ctrl-C.
    """
    if steps < MIN_STEPS:
        raise ValueError(f"steps={steps} is too short for an accident in the middle; give at least {MIN_STEPS}")
    output.mkdir(parents=True, exist_ok=True)
    # One thread gives the same numbers on machines with any number of cores. On a busy machine it is also faster for
    # so small a model, whose threads would mostly wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_folder, num_done, summary = _train(output, steps, online)
    finally:
        torch.set_num_threads(threads)
    # The output below is read from the run's file, so the demo shows what was logged, not what should have been.
    history = read_finished_run(run_folder)
    page = output / PAGE_NAME
    write_page(history, page)
    if num_done < steps:
        say(f"  stopped by Ctrl-C at step {num_done}; what was logged until then is kept")
    _say_what_was_logged(summary, history)
    _say_where_to_look(run_folder, page, online)
    if num_done < steps:
        return 130
    return 0 if len(history.steps) and history.incidents else 1


def _train(output: Path, steps: int, online: bool) -> tuple[Path, int, Summary]:
    """Return the folder of the run's file, the number of steps done before Ctrl-C, and the watcher's summary."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = read_corpus()
    model = GPT().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        styled("wandb_gradwatch demo", bold=True),
        f": a GPT of {num_parameters / 1e6:.1f} M parameters reads {len(corpus) / 1e6:.1f} MB of Python's own library, "
        f"on {device.type}",
    )
    settings = wandb.Settings(silent=True, console="off")  # the demo prints the run's location itself
    config = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "batch": BATCH, "layers": LAYERS}
    run = wandb.init(
        project=PROJECT,
        name=RUN_NAME,
        dir=output,
        mode="online" if online else "offline",
        settings=settings,
        config=config,
    )
    accident = range(steps // 2, steps // 2 + ACCIDENT_STEPS)
    done = 0
    above_the_bar = Styled("\r\x1b[2K" if sys.stdout.isatty() else "")
    with click.progressbar(length=steps, label="  training", show_pos=True) as bar:

        def say_at(step: int, text: str) -> None:
            say(above_the_bar, f"  step {step:<{len(str(steps))}}  ", text)

        def show(alert: Alert) -> None:
            say_at(alert.step, alert_title(alert.title, alert.level))

        with run, watch(model, sample_every=1, log_every=LOG_EVERY, on_alert=show) as watcher:
            with suppress(KeyboardInterrupt):
                for step in range(1, steps + 1):
                    if step == accident.start:
                        last_good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                        say_at(step, f"the accident: learning rate × {ACCIDENT_FACTOR}")
                        for group in optimizer.param_groups:
                            group["lr"] = LEARNING_RATE * ACCIDENT_FACTOR
                    elif step == accident.stop:
                        say_at(step, f"weights of step {accident.start - 1} restored, learning rate back")
                        model.load_state_dict(last_good[0])
                        optimizer.load_state_dict(last_good[1])
                    inputs_BT, targets_BT = _batch(corpus, device)
                    logits = model(inputs_BT)
                    loss = cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation
                    optimizer.step()
                    done, loss_now = step, loss.item()
                    run.log({"loss": loss_now, "learning_rate": optimizer.param_groups[0]["lr"]})
                    if above_the_bar:  # in a file each new label would be another line
                        bar.label = f"  loss {loss_now:.3f}"
                    bar.update(1)
            summary = watcher.summary()
    return Path(run.settings.sync_dir), done, summary


def _batch(corpus: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random pieces of the text, and the same pieces shifted by one byte: two [B, T]."""
    starts_B1 = torch.randint(len(corpus) - CONTEXT, (BATCH, 1))
    pieces = corpus[starts_B1 + torch.arange(CONTEXT + 1)].to(device)
    return pieces[:, :-1], pieces[:, 1:]


def _say_what_was_logged(summary: Summary, history: RunHistory) -> None:
    num_rows = np.count_nonzero(np.isfinite(history.first_of(keys.GRAD_NORM)))  # without the flight recorder's table
    num_histograms = sum(len(series.steps) for series in history.histograms.values())
    say()
    say(
        f"  in the run: {num_rows} rows of gradients, {len(history.values)} scalar keys, {num_histograms} histograms "
        f"({keys.GRADIENT_HISTOGRAMS}/*) of {len(history.histograms)} parameters"
    )
    title("watcher.summary()")
    for line in str(summary).splitlines():
        say(f"  {line}".rstrip())
    if history.incidents:
        title("Incidents of the run (W&B passes their alerts on to Slack or e-mail)")
        for incident in history.incidents:
            say("  ", alert_title(incident.title, incident.level))
            paragraph(incident.text, indent=4)


def _say_where_to_look(run_folder: Path, page: Path, online: bool) -> None:
    title("Where to look at the run")
    folder = near(run_folder)
    command = "wandb" if shutil.which("wandb") else near(Path(sys.executable).parent / "wandb")
    looks = [("a page", str(near(page))), ("a terminal", f"{command} leet {folder}")]
    looks.append(("on W&B", "the project " + PROJECT if online else f"{command} sync {folder}"))
    pairs(looks)
