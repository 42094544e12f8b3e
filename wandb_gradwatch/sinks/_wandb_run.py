"""Log snapshots and alerts to a W&B run that the user owns: never started, finished or moved by us."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from ..rules import Alert
from ..snapshot import Snapshot, keys
from ..snapshot._shapes import GroupBy, group_function
from ._base import Sink
from ._history_row import Details, HistoryRow, Number, Rebinner, TableRow, in_namespace
from ._row_scheduler import RowScheduler, row_scheduler_of

logger = logging.getLogger("wandb_gradwatch")

MAX_METRICS: Final = 10_000  # W&B advises fewer in a run
_ALERT_WAIT_SECONDS: Final = 1  # W&B swallows alerts of one title within this; 0 would mean its default of 60
_STARVED_WINDOWS: Final = 8

MAX_SERIES: Final = 256  # names per key family, of which there are a dozen
_LATER: Final = "later"  # the group of what appears after the neighbours were chosen
# What counts neighbours: the last part of a name that is a number; where there is none, the last digits.
_INDEX: Final = re.compile(r"(?<![^.])\d+(?![^.])(?!.*(?<![^.])\d+(?![^.]))")
_DIGITS: Final = re.compile(r"\d+(?!.*\d)")

Grouping = Callable[[str], str]


def check_details(details: Details) -> Details:
    """Check the names, and return the details in a form that nobody else can change.

    Raises:
        ValueError: a name does not exist, `details` is no sequence of names, or a pattern is not a regular expression.
    """
    if isinstance(details, Mapping):
        for name, pattern in details.items():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(f"details: {pattern!r}, of {name!r}, is no regular expression: {error}") from None
    known = tuple(keys.DETAILS)
    is_several = isinstance(details, Collection) and not isinstance(details, str)
    if not is_several or any(name not in known for name in details):
        raise ValueError(f"details={details!r} must be a sequence of names out of {known}, or a pattern by such a name")
    return dict(details) if isinstance(details, Mapping) else tuple(details)


class WandbSink(Sink):
    """Write one history row per snapshot, under the keys of the README, and send alerts with `run.alert`.

    The user's own rows and steps stay as they are without this sink. A row of the sink may therefore wait for the
    user's next `run.log()`, at the latest until the run ends. In a disabled run nothing is written.

    Args:
        run: a `wandb.Run`; None takes `wandb.run`.
        group_by: what one series shows: "parameter", "module", or a function from a parameter's name to its group's.
            None: parameters; of more than 256, as many neighbours together as are needed, which is said once.
        histograms: log `gradients/<name>`, and the histograms of metrics.
        details: further numbers of every layer, such as ("mean", "std"); or a dict from such a name to the regular
            expression that the layers' names must match, as in `wandb_gradwatch.watch`.
        namespace: log the whole model's numbers under `gradwatch/<namespace>/` instead of `gradwatch/`, for a second
            model in one run.
        commit: log every row at once, as a W&B step of its own. For scripts that never call `run.log()`; it moves the
            steps of those that do.

    Raises:
        RuntimeError: there is no run, or it has ended.
        TypeError: `run` is not a W&B run.
        ValueError: `group_by` is none of the above, or `details` holds a name that does not exist.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        group_by: GroupBy | None = None,
        histograms: bool = True,
        details: Details = (),
        namespace: str = "",
        commit: bool = False,
    ) -> None:
        import wandb

        run = wandb.run if run is None else run
        if run is None:
            raise RuntimeError("WandbSink() found no W&B run; call wandb.init() first or pass run=")
        if not (hasattr(run, "disabled") and hasattr(run, "define_metric")):  # the module wandb has its functions
            raise TypeError(f"WandbSink(run={run!r}) must be what wandb.init() returns")
        if getattr(run, "_is_finished", False):
            raise RuntimeError(f"W&B run {run.id!r} has ended; call wandb.init() again and pass the new run")
        group_function(group_by or "parameter")
        self._run = run
        self._grouping = SeriesGrouping(group_by)
        self._details = check_details(details)
        self._namespace = namespace
        self._commit = commit
        self._rebinner = Rebinner() if histograms else None
        self._said: set[str] = set()
        self._defined: set[str] = set()
        self._told_names: list[str] = []
        self._kept_table: TableRow | None = None
        self._forget: list[Callable[[], None]] = []
        self._row_scheduler: RowScheduler | None = None
        if not run.disabled:
            self._row_scheduler = row_scheduler_of(run)
            self._define_metrics()

    def __repr__(self) -> str:
        return f"WandbSink(run={self._run.id!r})"

    @property
    def run(self) -> Any:
        """The run, as it was given."""
        return self._run

    def namespace_in(self, run: object) -> str | None:
        return self._namespace if self._run is run else None

    def pop_seconds(self) -> float:
        return 0.0 if self._row_scheduler is None else self._row_scheduler.pop_seconds()

    def before_run_ends(self, callback: Callable[[], object]) -> None:
        """Call back once when the run ends, however it ends, while `write` and `alert` still work, unless closed."""
        if self._row_scheduler is not None:
            self._forget.append(self._row_scheduler.before_end(callback))

    def write(self, snapshot: Snapshot) -> None:
        """Log a snapshot when that leaves the user's rows as they are."""
        row_scheduler = self._live_scheduler()
        if row_scheduler is None or not len(snapshot):
            return
        if not self._defined.issuperset(measured := (*snapshot.metrics, *snapshot.metric_histograms)):
            self._defined.update(measured)
            self._define_metrics(measured)
        if len(snapshot.metrics) > MAX_METRICS:
            self._say(
                "%d metrics are more than the %d that W&B shows well in a run. Measure fewer: match= and statistics= "
                "of what is in watch(metrics=...) choose among modules, parameters and numbers.",
                len(snapshot.metrics),
                MAX_METRICS,
            )
        grouped = self._grouping.apply(snapshot)
        self._tell_order(list(grouped.names))
        row = HistoryRow.of(grouped, self._details, self._rebinner, self._namespace)
        row_scheduler.put(self, row, commit=self._commit)
        if row_scheduler.num_waiting > 1:
            self._show_newest(row, row_scheduler)

    @property
    def directory(self) -> str | None:
        """The run's folder, whose files W&B keeps with the run; None for a disabled run."""
        return None if self._row_scheduler is None else str(self._run.dir)

    def log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Log the flight recorder, as a table in a row of its own; online when the run ends, the newest one.

        W&B makes a table an artifact, and asks the server for it within `run.log`: a server that does not answer would
        stop the training, at the very step that an alert is about.
        """
        row_scheduler = self._live_scheduler()
        if row_scheduler is None or not rows:
            return
        table = TableRow(columns, rows)
        if self._run.offline:
            row_scheduler.put(object(), table, commit=self._commit)  # an owner of its own: it merges with nothing
            return
        if self._kept_table is None:
            row_scheduler.before_end(self._put_kept_table)
        self._kept_table = table

    def _put_kept_table(self) -> None:
        if self._row_scheduler is not None and self._kept_table is not None:
            self._row_scheduler.put(object(), self._kept_table)

    def alert(self, alert: Alert) -> None:
        """Send an alert now; W&B forwards it to the user's Slack or e-mail."""
        if self._live_scheduler() is not None:
            self._run.alert(title=alert.title, text=alert.text, level=alert.level, wait_duration=_ALERT_WAIT_SECONDS)

    def close(self) -> None:
        """Write no more. Rows that still wait stay with the run and are logged before it ends; the run goes on."""
        for forget in self._forget:
            forget()
        self._row_scheduler = None

    def _live_scheduler(self) -> RowScheduler | None:
        """The run's scheduler; None of a disabled run, after `close`, and, which is said, after the run's end."""
        if self._row_scheduler is None or not self._row_scheduler.ended:
            return self._row_scheduler
        ended = "W&B run %r has ended: gradients are no longer logged to it. In the next run call watch() again."
        self._say(ended, self._run.id)
        return None

    def _show_newest(self, row: HistoryRow, row_scheduler: RowScheduler) -> None:
        """Rows pile up, as the script logs rarely or never: keep at least the run's summary fresh."""
        scalars = row.scalars()
        fresh: dict[str, Number] = {key: scalars[key] for key in (keys.STEP, *keys.SUMMARY) if key in scalars}
        self._run.summary.update(in_namespace(fresh, self._namespace))
        if row_scheduler.num_user_calls == 0 and row_scheduler.num_waiting >= _STARVED_WINDOWS:
            self._say(
                "%d windows of gradients wait for a row in the W&B history, because the script has not called "
                "run.log() yet. They are saved when it does or when the run ends; if it never does, use "
                "watch(..., sinks=[WandbSink(commit=True)]).",
                row_scheduler.num_waiting,
            )

    def _say(self, message: str, *args: object) -> None:
        """Log it, once of each kind."""
        if message not in self._said:
            self._said.add(message)
            logger.warning(message, *args)

    def _tell_order(self, names: list[str]) -> None:
        """Put the names into the run's config, in the model's order: the history loses it. Say what is none of them."""
        if names == self._told_names:
            return
        self._told_names = names
        told = {"names": names} if not self._namespace else {self._namespace: {"names": names}}
        self._run.config.update({"gradwatch": told}, allow_val_change=True)
        by_key: dict[str, list[str]] = {}
        for name in names:
            by_key.setdefault(keys.in_key(name), []).append(repr(name))
        if clashes := [" and ".join(group) for group in by_key.values() if len(group) > 1]:
            self._say(
                "In W&B, where a name has / for every dot, %s are one series, of the last of them: give one another "
                "name, or a group of its own with group_by=.",
                "; ".join(clashes[:3]),
            )
        for detail, pattern in self._details.items() if isinstance(self._details, dict) else ():
            if not any(re.search(pattern, name) for name in names):
                message = "details: %r is logged of no layer, because %r matches no name; the first names are %s."
                self._say(message, detail, pattern, names[:3])

    def _define_metrics(self, metrics: Iterable[str] = ()) -> None:
        """Tell W&B of our keys, each once, the step first."""
        assert self._row_scheduler is not None
        known = self._row_scheduler.defined
        definitions = keys.definitions(map(keys.in_key, metrics), self._namespace)
        for key, is_in_summary in ({keys.STEP: True} | definitions).items():
            if key not in known:
                known.add(key)
                # Without step_sync=False W&B adds our step to rows of the user that hold a name of these families.
                options = {} if key == keys.STEP else {"step_metric": keys.STEP, "step_sync": False}
                # A histogram in the summary is sent again, whole, every few seconds.
                self._run.define_metric(key, **options, **({} if is_in_summary else {"summary": "none"}))


class SeriesGrouping:
    """The groups that the user asked for, otherwise parameters, or groups that keep the number of series sane.

    Owns the grouping that was found to be coarse enough: it stays, and is said once.
    """

    def __init__(self, group_by: GroupBy | None) -> None:
        self._chosen = group_by
        self._automatic: GroupBy = "parameter"

    def apply(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with one name per series."""
        if self._chosen is not None:
            return snapshot.by_group(self._chosen)
        grouped = snapshot.by_group(self._automatic)
        if len(grouped.names) <= MAX_SERIES:
            return grouped
        self._automatic, description = coarse_grouping(snapshot.names)
        grouped = snapshot.by_group(self._automatic)
        logger.warning(
            "%d parameters are more than the %d series that W&B shows well: they are logged as %d groups (%s). "
            'Pass group_by= to choose: a function from a name to its group\'s, or "parameter" to keep every one.',
            len(snapshot.names),
            MAX_SERIES,
            len(grouped.names),
            description,
        )
        return grouped


def coarse_grouping(names: tuple[str, ...]) -> tuple[Grouping, str]:
    """The finest grouping of more than MAX_SERIES names that gives at most so many groups, and what to call it.

    Modules, or what the first parts of the names divide, if that gives at least half of what is allowed; otherwise
    neighbours of one kind together: blocks.0-1.fc, blocks.2-3.fc, ...
    """
    levels = [(group_function("module"), "one per module")]  # from fine to coarse
    for depth in range(max(name.count(".") for name in names), 0, -1):
        levels.append((_prefix(depth), f"by the first {depth} part{'s' if depth > 1 else ''} of the name"))
    natural = next((level for level in levels if len(_groups(names, level[0])) <= MAX_SERIES), None)
    if natural is not None and len(_groups(names, natural[0])) >= MAX_SERIES // 2:
        return natural
    # What divides too little leaves nothing to join; the names themselves, if everything does: a long ParameterList.
    finer: list[Grouping] = [level for level, _ in levels if len(_groups(names, level)) > MAX_SERIES] or [str]
    kinds: dict[str, list[str]] = {}
    for level in finer:
        kinds = {}  # groups whose names differ in their last number only
        for group in _groups(names, level):
            number = _number_in(group)
            kind = group if number is None else f"{group[: number.start()]}\0{group[number.end() :]}"
            kinds.setdefault(kind, []).append(group)
        if len(kinds) < MAX_SERIES:
            break
    else:  # no numbers in the names: neighbours of any kind
        kinds = {"": _groups(names, level)}
    group_of, largest = _joined(kinds)
    return (lambda name: group_of.get(level(name), _LATER)), f"up to {largest} neighbours of one kind each"


def _prefix(depth: int) -> Grouping:
    return lambda name: ".".join(name.split(".")[:depth])


def _groups(names: Iterable[str], group_of: Grouping) -> list[str]:
    return list(dict.fromkeys(map(group_of, names)))


def _joined(kinds: dict[str, list[str]]) -> tuple[dict[str, str], int]:
    """Each group's series, and the most groups that one series joins; the kinds share the series by their sizes.

    One series is left for what appears later.
    """
    # Each kind has one series for certain: the others go to where most is left to join, so that sizes are alike.
    num_series = dict.fromkeys(kinds, 1)
    for _ in range(MAX_SERIES - 1 - len(kinds)):
        num_series[max(kinds, key=lambda kind: len(kinds[kind]) / num_series[kind])] += 1
    group_of: dict[str, str] = {}
    largest = 1
    for kind, members in kinds.items():
        count = num_series[kind]
        for index in range(count):
            joined = members[index * len(members) // count : (index + 1) * len(members) // count]
            group_of |= dict.fromkeys(joined, _joined_name(joined))
            largest = max(largest, len(joined))
    return group_of, largest


def _joined_name(members: list[str]) -> str:
    first, last = members[0], members[-1]
    if first == last:
        return first
    begin, end = _number_in(first), _number_in(last)
    if begin is None or end is None or first[: begin.start()] != last[: end.start()]:
        return f"{first}-{last}"
    return f"{first[: begin.end()]}-{end[0]}{first[begin.end() :]}"


def _number_in(name: str) -> re.Match[str] | None:
    return _INDEX.search(name) or _DIGITS.search(name)
