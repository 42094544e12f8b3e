"""Log snapshots and alerts to a W&B run that the user owns: never started, finished or moved by us."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..rules import Alert
from ..snapshot import GroupBy, Snapshot, group_function
from .history_row import HISTOGRAM_FAMILY, SCALAR_FAMILIES, STEP_KEY, HistoryRow, Number, metric_name
from .picture import Pictures
from .placement import Placement, placement_of

logger = logging.getLogger("wandb_gradwatch")

TABLE_KEY: Final = "gradwatch/flight_recorder"
MAX_METRICS: Final = 10_000  # W&B advises fewer in a run
MAX_SERIES: Final = 256  # names per key family, of which there are a dozen
MAX_ROW_BYTES: Final = 1_000_000  # W&B skips a row above 10.4 MB whole, with the user's keys in it
_NUMBER_BYTES: Final = 24  # of a float as JSON, with its comma
_ALERT_WAIT_SECONDS: Final = 1  # W&B swallows alerts of one title within this; 0 would mean its default of 60
_STARVED_WINDOWS: Final = 8


class WandbSink:
    """Write one history row per snapshot, under the keys of the README, and send alerts with `run.alert`.

    The user's own rows stay as they are without this sink; see `placement`. Rows may therefore wait for the user's next
    `run.log()`, at the latest until the run ends. In a disabled run nothing happens.

    Args:
        run: a `wandb.Run`; None takes `wandb.run`.
        group_by: what one series shows: "parameter", "module" or a function from a parameter's name to its group's.
            None: parameters, and modules when there are more than 256 names, which is said once.
        histograms: log `gradients/<name>`, and the histograms of metrics.
        namespace: log the whole model's numbers under `gradwatch/<namespace>/` instead of `gradwatch/`, for a second
            model in one run.
        commit: log every row at once, as a W&B step of its own. For scripts that never call `run.log()`; it moves the
            steps of those that do.

    Raises:
        RuntimeError: there is no run, or it has ended.
        TypeError: what is given as run is none.
        ValueError: `group_by` is none of the above.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        group_by: GroupBy | None = None,
        histograms: bool = True,
        namespace: str = "",
        commit: bool = False,
    ) -> None:
        import wandb

        run = wandb.run if run is None else run
        if run is None:
            raise RuntimeError("WandbSink() found no W&B run; call wandb.init() first or pass run=")
        if not (hasattr(run, "log") and hasattr(run, "define_metric")):
            raise TypeError(f"WandbSink(run={run!r}) must be what wandb.init() returns")
        if getattr(run, "_is_finished", False):
            raise RuntimeError(f"W&B run {run.id!r} has ended; call wandb.init() again and pass the new run")
        if group_by is not None:
            group_function(group_by)
        self._run = run
        self._grouping = _Grouping(group_by)
        self._histograms = histograms
        self._namespace = namespace
        self._commit = commit
        self._pictures = Pictures()
        self._said: set[str] = set()
        self._told_names: list[str] = []
        self._kept_table: _TableRow | None = None
        self._forget: list[Callable[[], None]] = []
        self._placement: Placement | None = None
        if not run.disabled:
            self._placement = placement_of(run)
            self._define_families()

    def __repr__(self) -> str:
        return f"WandbSink(run={self._run.id!r})"

    @property
    def run(self) -> Any:
        """The run, as it was given."""
        return self._run

    def before_run_ends(self, callback: Callable[[], object]) -> None:
        """Call back once when the run ends, however it ends, while `write` and `alert` still work: for a last flush.

        `close` takes the request back.
        """
        if self._placement is not None:
            self._forget.append(self._placement.before_end(callback))

    def write(self, snapshot: Snapshot) -> None:
        """Log a snapshot when that leaves the user's rows as they are."""
        if self._placement is None or not len(snapshot) or self._has_ended(self._placement):
            return
        self._define_metrics(snapshot, self._placement)
        self._tell_order(snapshot)
        row = HistoryRow.of(self._grouping.apply(snapshot))
        pictures = self._pictures if self._histograms else None
        self._placement.put(self, _RunRow(row, pictures, self._namespace), commit=self._commit)
        if self._placement.num_waiting > 1:
            self._show_newest(row, self._placement)

    @property
    def directory(self) -> str | None:
        """The run's folder, whose files W&B keeps with the run; None for a disabled run."""
        return None if self._placement is None else str(self._run.dir)

    def log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Log the flight recorder, as a table in a row of its own; online when the run ends, the newest one.

        W&B makes a table an artifact, and asks the server for it within `run.log`: a server that does not answer would
        stop the training, at the very step that an alert is about.
        """
        if self._placement is None or not rows or self._has_ended(self._placement):
            return
        table = _TableRow(columns, rows)
        if self._run.offline:
            self._placement.put(object(), table, commit=self._commit)  # an owner of its own: it merges with nothing
            return
        if self._kept_table is None:
            self._placement.before_end(self._put_kept_table)
        self._kept_table = table

    def _put_kept_table(self) -> None:
        if self._placement is not None and self._kept_table is not None:
            self._placement.put(object(), self._kept_table)

    def alert(self, alert: Alert) -> None:
        """Send an alert now; W&B forwards it to the user's Slack or e-mail."""
        if self._placement is None or self._has_ended(self._placement):
            return
        self._run.alert(title=alert.title, text=alert.text, level=alert.level, wait_duration=_ALERT_WAIT_SECONDS)

    def close(self) -> None:
        """Write no more. Rows that still wait stay with the run and are logged before it ends; the run goes on."""
        for forget in self._forget:
            forget()
        self._placement = None

    def _has_ended(self, placement: Placement) -> bool:
        if placement.ended:
            self._say("ended", "W&B run %r has ended: gradients are no longer logged to it.", self._run.id)
        return placement.ended

    def _show_newest(self, row: HistoryRow, placement: Placement) -> None:
        """Rows pile up, as the script logs rarely or never: keep at least the run's summary fresh."""
        self._run.summary.update(_in_namespace(row.vitals(), self._namespace))
        if placement.num_user_calls == 0 and placement.num_waiting >= _STARVED_WINDOWS:
            self._say(
                "starved",
                "%d windows of gradients wait for a row in the W&B history, because the script has not called "
                "run.log() yet. They are saved when it does or when the run ends; if it never does, use "
                "watch(..., sinks=[WandbSink(commit=True)]).",
                placement.num_waiting,
            )

    def _say(self, kind: str, message: str, *args: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(message, *args)

    def _tell_order(self, snapshot: Snapshot) -> None:
        """Put the names into the run's config, in the model's order: the history loses it."""
        names = list(self._grouping.apply(snapshot).names)
        if names != self._told_names:
            self._told_names = names
            told = {"names": names} if not self._namespace else {self._namespace: {"names": names}}
            self._run.config.update({"gradwatch": told}, allow_val_change=True)

    # ---- metric definitions

    def _define_families(self) -> None:
        self._define(STEP_KEY)
        for family in SCALAR_FAMILIES:
            self._define(f"{family}/*", step_metric=STEP_KEY)
        # A histogram in the summary is sent again, whole, every few seconds.
        self._define(f"{HISTOGRAM_FAMILY}/*", step_metric=STEP_KEY, summary="none")

    def _define_metrics(self, snapshot: Snapshot, placement: Placement) -> None:
        for name in map(metric_name, snapshot.metrics):
            if name.partition("/")[0] not in SCALAR_FAMILIES and name not in placement.defined:
                self._define(name, step_metric=STEP_KEY)
        if len(snapshot.metrics) > MAX_METRICS:
            self._say(
                "many metrics",
                "%d metrics are more than the %d that W&B shows well in a run. Measure fewer: match= and statistics= "
                "of what is in watch(metrics=...) choose among modules, parameters and numbers.",
                len(snapshot.metrics),
                MAX_METRICS,
            )
        for name in map(metric_name, snapshot.metric_histograms):
            # With the star: W&B heeds "none" for patterns only, and one may end in nothing but a star.
            self._define(f"{name}*", step_metric=STEP_KEY, summary="none")

    def _define(self, name: str, **options: Any) -> None:
        assert self._placement is not None
        if name in self._placement.defined:
            return
        self._placement.defined.add(name)
        if "step_metric" in options:
            # Else W&B adds our step to rows of the user that hold a name of these families.
            options["step_sync"] = False
        self._run.define_metric(name, **options)


class _Grouping:
    """The groups that the user asked for, or ones that keep the number of series sane."""

    def __init__(self, group_by: GroupBy | None) -> None:
        self._chosen = group_by
        self._automatic: GroupBy = "parameter"

    def apply(self, snapshot: Snapshot) -> Snapshot:
        if self._chosen is not None:
            return snapshot.by_group(self._chosen)
        grouped = snapshot.by_group(self._automatic)
        if len(grouped.names) <= MAX_SERIES:
            return grouped
        names = snapshot.names
        self._automatic, description = next(
            (coarser for coarser in _coarser(names) if _num_groups(names, coarser[0]) <= MAX_SERIES),
            _neighbours(names),
        )
        grouped = snapshot.by_group(self._automatic)
        logger.warning(
            "%d parameters are more than the %d series that W&B shows well: they are logged as %d groups (%s). "
            'Pass group_by= ("parameter", "module" or a function) to choose.',
            len(snapshot.names),
            MAX_SERIES,
            len(grouped.names),
            description,
        )
        return grouped


def _coarser(names: tuple[str, ...]) -> Iterator[tuple[GroupBy, str]]:
    """Groupings from fine to coarse."""
    yield "module", "one per module"
    for depth in range(max(name.count(".") for name in names), 0, -1):
        yield _prefix(depth), f"by the first {depth} part{'s' if depth > 1 else ''} of the name"


def _neighbours(names: tuple[str, ...]) -> tuple[GroupBy, str]:
    """Thousands of modules side by side, which no part of their names divides: so many in a row are one group."""
    modules = list(dict.fromkeys(map(_prefix(1), names)))
    size = -(-len(modules) // (MAX_SERIES - 1))  # one series is for what appears later
    groups: dict[str, str] = {}
    for start in range(0, len(modules), size):
        members = modules[start : start + size]
        groups |= dict.fromkeys(members, f"{members[0]}-{members[-1]}" if len(members) > 1 else members[0])
    return lambda name: groups.get(_prefix(1)(name), "later"), f"{size} neighbours each"


def _num_groups(names: tuple[str, ...], group_by: GroupBy) -> int:
    return len(set(map(group_function(group_by), names)))


def _prefix(depth: int) -> Callable[[str], str]:
    return lambda name: ".".join(name.split(".")[:depth])


@dataclass(frozen=True)
class _RunRow:
    """A row as the placement sees it: mergeable while it waits, made into W&B's types when its turn comes."""

    row: HistoryRow
    pictures: Pictures | None
    namespace: str = ""

    def merge(self, later: _RunRow) -> _RunRow:
        return _RunRow(self.row.merge(later.row), later.pictures, later.namespace)

    def parts(self) -> list[dict[str, Any]]:
        values: list[tuple[str, Any, int]] = [
            (key, value, len(key) + _NUMBER_BYTES)
            for key, value in _in_namespace(self.row.scalars(), self.namespace).items()
        ]
        if self.pictures is not None:
            values += _histograms(self.pictures, self.row)
        return _spread(values, {STEP_KEY: self.row.step})


@dataclass(frozen=True)
class _TableRow:
    """The flight recorder's table as the placement sees it: the later of two holds what the earlier did."""

    columns: list[str]
    rows: list[list[Any]]

    def merge(self, later: _TableRow) -> _TableRow:
        return later

    def parts(self) -> list[dict[str, Any]]:
        import wandb

        newest = max(row[self.columns.index("step")] for row in self.rows)
        return [{STEP_KEY: newest, TABLE_KEY: wandb.Table(columns=[*self.columns], data=self.rows)}]


def _in_namespace(values: dict[str, Number], namespace: str) -> dict[str, Number]:
    """The whole model's numbers below a namespace; the step, and what has a layer's name, stay."""
    if not namespace:
        return values
    own = f"gradwatch/{namespace}/"
    return {
        key if key == STEP_KEY or not key.startswith("gradwatch/") else own + key.removeprefix("gradwatch/"): value
        for key, value in values.items()
    }


def _histograms(pictures: Pictures, row: HistoryRow) -> Iterator[tuple[str, Any, int]]:
    import wandb

    drawn = {} if row.pictured is None else pictures.of(row.pictured)
    keyed = {f"{HISTOGRAM_FAMILY}/{metric_name(name)}": picture for name, picture in drawn.items()}
    for key, (counts, edges) in (keyed | pictures.of_metrics(row.metric_histograms)).items():
        size = len(key) + len(edges) * _NUMBER_BYTES + len(counts) * (len(str(max(counts))) + 2)
        # It asks for arrays and turns them into the lists that these are already.
        yield key, wandb.Histogram(np_histogram=(counts, edges)), size  # type: ignore[arg-type]


def _spread(values: list[tuple[str, Any, int]], step: dict[str, int]) -> list[dict[str, Any]]:
    """Fill rows up to the size limit, in order, each with the step."""
    parts: list[dict[str, Any]] = [dict(step)]
    filled = 0
    for key, value, size in values:
        if filled + size > MAX_ROW_BYTES and len(parts[-1]) > len(step):
            parts.append(dict(step))
            filled = 0
        parts[-1][key] = value
        filled += size
    return parts
