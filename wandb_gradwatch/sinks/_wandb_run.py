"""A sink that logs snapshots and alerts to a W&B run. The user owns the run: the sink does not start or finish it."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from .._interruptions import raise_interruption
from .._judgement.incident import LEVELS
from .._judgement.verdict import Verdict, incidents_within, verdict_of
from ..rules import Alert
from ..snapshot import Snapshot, keys
from ..snapshot._shapes import GroupBy, group_function
from ._base import Sink
from ._history_row import HistoryRow, Rebinner, TableRow, ZerosLeftOut
from ._row_scheduler import RowScheduler, logger, row_scheduler_of

MAX_METRICS: Final = 10_000  # W&B recommends fewer distinct metrics in a run
# W&B drops alerts with the same title within this time; 0 means W&B's default of 60. An incident whose level rises is
# told again, perhaps at the next step.
_ALERT_WAIT_SECONDS: Final = 0.001
MAX_INCIDENTS_BYTES: Final = 20_000  # W&B sends the whole summary every 15 seconds
_STARVED_WINDOWS: Final = 8  # queued rows from which on the user is warned

MAX_SERIES: Final = 256  # names in each family of keys; there are about a dozen families
_LATER: Final = "later"  # the group of names that appear after the grouping was chosen
# A name around the number that orders neighbours: the last part that is a number, or else the last digits.
_NUMBERED: Final = (re.compile(r"((?:.*\.)?)(\d+)((?:\..*)?)"), re.compile(r"((?:.*\D)?)(\d+)(\D*)"))

Grouping = Callable[[str], str]
# Names of further statistics of every layer; or a dict from such a name to a regex to search for in layers' names.
Details = Sequence[str] | Mapping[str, str]


def check_details(details: Details) -> dict[str, str]:
    """Check `details` and return the pattern of each; "" matches all layers."""
    if isinstance(details, Mapping):
        for name, pattern in details.items():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(f"details[{name!r}]={pattern!r} is not a regular expression: {error}") from None
    known = (*keys.DETAILS, keys.PRECISION)
    is_several = isinstance(details, Collection) and not isinstance(details, str)
    if not is_several or any(name not in known for name in details):
        raise ValueError(f"details={details!r} must be a sequence, or a dict from name to pattern, of names in {known}")
    if isinstance(details, Mapping) and details.get(keys.PRECISION):
        raise ValueError(f'details[{keys.PRECISION!r}] is about the whole model and must be the empty pattern ""')
    return dict(details) if isinstance(details, Mapping) else dict.fromkeys(details, "")


class WandbSink(Sink):
    """Log every snapshot as one W&B history row, under the keys of docs/keys.md, and alerts with `run.alert`.

    The run's summary has the verdict and the incidents of all trainings in the run.

    The sink does not change the user's own rows and steps. A row of the sink therefore waits until the user's next
    `run.log()` if necessary, at the latest until the run ends. A disabled run receives no rows and no alerts.

    Args:
        run: a `wandb.Run`; None uses `wandb.run`.
        group_by: the unit of a series: "parameter", "module", or a function from a parameter's name to a group's name.
            None: one series per parameter; more than 256 parameters are grouped, with one log message.
        histograms: log `gradients/<name>` and the histograms of metrics.
        details: names of further statistics to log, such as ("mean", "std"); or a dict from such a name to a regular
            expression that must match a part of the layer's name, as in `wandb_gradwatch.watch`.
        namespace: log the model-wide numbers under `gradwatch/<namespace>/` instead of `gradwatch/`, for a second model
            in one run.
        commit: log every row at once as a W&B step of its own. Use it only in scripts that never call `run.log()`:
            other scripts' steps are shifted.

    Raises:
        RuntimeError: there is no run, or the run has ended.
        TypeError: `run` is not a W&B run.
        ValueError: `group_by` is none of the above, or `details` contains an unknown name or an invalid pattern.
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
        if not (hasattr(run, "disabled") and hasattr(run, "define_metric")):  # the module `wandb` has only the second
            raise TypeError(f"WandbSink(run={run!r}) must be what wandb.init() returns")
        if getattr(run, "_is_finished", False):
            raise RuntimeError(f"W&B run {run.id!r} has ended; call wandb.init() again and pass the new run")
        group_function(group_by or "parameter")  # checks it
        self.run: Final = run  # the W&B run that the sink logs to
        self._group_by = group_by  # None: one series per parameter, until there are too many names
        self._details = check_details(details)
        self._namespace = namespace
        self._commit = commit
        self._rebinner = Rebinner() if histograms else None
        self._zeros = ZerosLeftOut()
        self._said: set[str] = set()
        self._told_names: list[str] = []
        self._alert_level = 0  # the worst of the alerts since the last row; 0 without alerts
        self._key: Final = object()  # of this sink's verdict among those of all sinks of the run
        self._row_scheduler: RowScheduler | None = None
        if not run.disabled:
            self._row_scheduler = row_scheduler_of(run)

    def __repr__(self) -> str:
        return f"WandbSink(run={self.run.id!r})"

    def namespace_in(self, run: object) -> str | None:
        return self._namespace if self.run is run else None

    def pop_seconds(self) -> float:
        return 0.0 if self._row_scheduler is None else self._row_scheduler.pop_seconds()

    def before_run_ends(self, callback: Callable[[], object]) -> None:
        """Register a callback: unless the sink is closed, it is called once before the run ends, for a last `write`."""
        if self._row_scheduler is not None:
            self._row_scheduler.before_end(self, callback)

    def write(self, snapshot: Snapshot) -> None:
        """Queue a snapshot's row; it is logged as soon as that leaves the user's rows as they are."""
        row_scheduler = self._live_scheduler()
        if row_scheduler is None or not len(snapshot):
            return
        if len(snapshot.metrics) > MAX_METRICS:
            self._say(
                "metrics",
                f"There are {len(snapshot.metrics)} metrics, but W&B shows at most {MAX_METRICS} well in a run. "
                "Measure fewer: the metrics in watch(metrics=...) have arguments match= and statistics= that select "
                "modules, parameters and numbers.",
            )
        first, last = int(snapshot.steps[0]), row_scheduler.last_steps.get(self._namespace, -1)
        is_first_row = not self._told_names
        if is_first_row and first <= last and not row_scheduler.has_told_repeated:
            row_scheduler.has_told_repeated = True
            self._say(
                "repeated",
                f"W&B run {self.run.id!r} already has gradients up to step {last} of another training, and this one "
                f"begins at step {first}: the charts draw both over the same steps. Give each training, such as a fold "
                f"of a cross-validation, a run of its own, or pass watch(..., start_step={last}) to continue after the "
                "other.",
            )
        row_scheduler.last_steps[self._namespace] = int(snapshot.steps[-1])
        grouped = self._grouped(snapshot)
        self._tell_order(list(grouped.names))
        level, self._alert_level = self._alert_level, 0
        row = HistoryRow.of(grouped, self._details, self._rebinner, self._namespace, self._zeros, level)
        row_scheduler.put(self, row, commit=self._commit)
        if row_scheduler.is_starved and len(row_scheduler.waiting) > 1 and not row_scheduler.is_unanswered:
            self._show_newest(row, row_scheduler)

    @property
    def directory(self) -> str | None:
        """The folder of the run's files, which W&B uploads with the run; None for a disabled run."""
        return None if self._row_scheduler is None else str(self.run.dir)

    @property
    def viewable(self) -> str | None:
        """The folder of the run on this machine."""
        return None if self.directory is None else str(Path(self.directory).parent)

    def log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Log the flight recorder's samples as a table in a row of its own; online, only the newest at the run's end.

        An online run receives no table if the sink is closed before. The recorder's file is written in any case.
        """
        row_scheduler = self._live_scheduler()
        if row_scheduler is None or not rows:
            return
        put = partial(row_scheduler.put, object(), TableRow(columns, rows))  # a unique owner: a table is never merged
        if self.run.offline:
            put(commit=self._commit)
        else:  # W&B uploads a table during `run.log`: a server that hangs would block the training
            row_scheduler.forget((self, "table"))
            row_scheduler.before_end((self, "table"), put)

    def alert(self, alert: Alert) -> None:
        """Send an alert at once; W&B forwards it to Slack or e-mail if the user has switched that on."""
        if self._live_scheduler() is not None:
            self._alert_level = max(self._alert_level, LEVELS.index(alert.level) + 1)
            send = partial(self.run.alert, title=alert.title, text=alert.text, level=alert.level)
            self._try("an alert", partial(send, wait_duration=_ALERT_WAIT_SECONDS))

    def verdict(self, verdict: Verdict) -> None:
        """Write the verdict and the incidents of all trainings in this run, so far, into the run's summary."""
        row_scheduler = self._row_scheduler
        if row_scheduler is None or row_scheduler.ended or row_scheduler.is_unanswered:
            return
        row_scheduler.verdicts[self._key] = verdict
        of_run = row_scheduler.verdicts.values()
        incidents = [incident for one in of_run for incident in one.incidents]
        num_steps, num_measured = sum(one.num_steps for one in of_run), sum(one.num_measured for one in of_run)
        summary = {keys.VERDICT: verdict_of(incidents, num_steps=num_steps, num_measured=num_measured).sentence}
        if incidents:  # W&B prints the summary's first keys at the end of the run
            summary[keys.INCIDENTS] = json.dumps(incidents_within(incidents, MAX_INCIDENTS_BYTES))
        self._try("the verdict", lambda: self.run.summary.update(summary))

    def close(self) -> None:
        """Stop writing. Queued rows are still logged before the run ends. The run itself continues."""
        if self._row_scheduler is not None:
            self._row_scheduler.forget(self)
            self._row_scheduler.forget((self, "table"))
        self._row_scheduler = None

    def _live_scheduler(self) -> RowScheduler | None:
        """The run's scheduler; None for a disabled run, after `close`, and after the run's end, with a warning."""
        if self._row_scheduler is None or not self._row_scheduler.ended:
            return self._row_scheduler
        ended = "has ended: gradients are no longer logged to it. Call watch() again in the next run."
        self._say("ended", f"W&B run {self.run.id!r} {ended}")
        return None

    def _grouped(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with one name per series; a grouping that is chosen here is kept, and told once."""
        grouped = snapshot.by_group(self._group_by or "parameter")
        if self._group_by is None and len(grouped.names) > MAX_SERIES:
            self._group_by, description = coarse_grouping(snapshot.names)
            grouped = snapshot.by_group(self._group_by)
            self._say(
                "grouped",
                f"of {len(snapshot.names)} parameters W&B would show no more than {MAX_SERIES} well: they are logged "
                f'as {len(grouped.names)} groups ({description}). To choose, pass group_by="parameter" for all, or '
                "group_by= a function from parameter name to group name.",
            )
        return grouped

    def _show_newest(self, row: HistoryRow, row_scheduler: RowScheduler) -> None:
        """Update the run's summary while rows are queued because the script seldom or never calls `run.log()`."""
        shown = {keys.in_namespace(key, self._namespace) for key in (keys.STEP, *keys.SUMMARY)}
        newest = {key: value for key, value in row.scalars().items() if key in shown}
        self._try("the summary", lambda: self.run.summary.update(newest))
        if row_scheduler.num_user_calls == 0 and len(row_scheduler.waiting) >= _STARVED_WINDOWS:
            self._say(
                "queued",
                f"{len(row_scheduler.waiting)} rows of gradients are queued because the script has not called "
                "run.log() yet. They are logged when the script calls run.log(), or when the run ends; a process that "
                "is killed (SIGTERM, os._exit) loses them. If the script never calls run.log(), use watch(..., "
                "sinks=[WandbSink(commit=True)]).",
            )

    def _try(self, what: str, action: Callable[[], object]) -> None:
        """Do what rows do not depend on. If it raises, say so once per `what`; rows are still logged."""
        try:
            action()
        except Exception as error:
            raise_interruption(error)
            if what not in self._said:
                self._said.add(what)
                text = "%s could not be sent to W&B; rows and the training go on"
                logger.error(f"wandb_gradwatch: {text}", what, exc_info=error)

    def _say(self, kind: str, text: str) -> None:
        """Log a warning once per kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("wandb_gradwatch: %s", text)

    def _tell_order(self, names: list[str]) -> None:
        """Save the names in the run's config in the model's order, which the history loses; warn about shared keys."""
        if names == self._told_names:
            return
        self._told_names = names
        told = {"names": names} if not self._namespace else {self._namespace: {"names": names}}
        self._try("the order of the layers", lambda: self.run.config.update({"gradwatch": told}, allow_val_change=True))
        by_key: dict[str, list[str]] = {}
        for name in names:
            by_key.setdefault(keys.in_key(name), []).append(repr(name))
        if clashes := [" and ".join(group) for group in by_key.values() if len(group) > 1]:
            self._say(
                "clash",
                f"W&B keys have / in place of every dot, so {'; '.join(clashes[:3])} share one series, which shows "
                "only the last of them. Rename one, or put it into a group of its own with group_by=.",
            )
        for detail, pattern in self._details.items():
            if pattern and not any(re.search(pattern, name) for name in names):
                why = f"because {pattern!r} matches no name; the first names are {names[:3]}."
                self._say("details", f"details: {detail!r} is logged for no layer, {why}")


def coarse_grouping(names: tuple[str, ...]) -> tuple[Grouping, str]:
    """The finest grouping of more than MAX_SERIES names into at most MAX_SERIES groups, and its description.

    Groups are modules, or names with the same first parts, if there are at least MAX_SERIES / 2 such groups. Otherwise
    neighbours of one kind are joined: blocks.0-1.fc, blocks.2-3.fc, ...
    """
    descriptions = {group_function("module"): "one per module"}  # of levels, from fine to coarse
    for depth in range(max(name.count(".") for name in names), 0, -1):
        descriptions[_prefix(depth)] = f"by the first {depth} part{'s' if depth > 1 else ''} of the name"
    groups_of = {level: list(dict.fromkeys(map(level, names))) for level in descriptions}
    natural = next((level for level, groups in groups_of.items() if len(groups) <= MAX_SERIES), None)
    if natural is not None and len(groups_of[natural]) >= MAX_SERIES // 2:
        return natural, descriptions[natural]
    # A level with few groups leaves none to join. If every level has few (a long ParameterList), join the names.
    finer = {level: groups for level, groups in groups_of.items() if len(groups) > MAX_SERIES} or {str: list(names)}
    kinds_of = {level: _kinds(groups) for level, groups in finer.items()}
    level = next((level for level, kinds in kinds_of.items() if len(kinds) < MAX_SERIES), list(finer)[-1])
    has_numbers = len(kinds_of[level]) < MAX_SERIES  # otherwise join neighbours of any kind
    series = _neighbours(kinds_of[level] if has_numbers else [finer[level]])
    series_of = {group: _joined_name(members) for members in series for group in members}
    description = f"up to {max(map(len, series))} neighbours of one kind each"
    return (lambda name: series_of.get(level(name), _LATER)), description


def _prefix(depth: int) -> Grouping:
    return lambda name: ".".join(name.split(".")[:depth])


def _kinds(groups: list[str]) -> list[list[str]]:
    """Put groups together whose names differ only in their number."""
    kinds: dict[tuple[str, bool, str], list[str]] = {}
    for group in groups:
        before, number, after = _around_number(group)
        kinds.setdefault((before, bool(number), after), []).append(group)
    return list(kinds.values())


def _neighbours(kinds: list[list[str]]) -> list[list[str]]:
    """Divide kinds into at least one series of neighbours each; one series is reserved for names that appear later."""
    num_series = [1] * len(kinds)
    for _ in range(MAX_SERIES - 1 - len(kinds)):  # each further series goes to the kind with the longest series
        num_series[max(range(len(kinds)), key=lambda kind: len(kinds[kind]) / num_series[kind])] += 1
    return [
        members[index * len(members) // count : (index + 1) * len(members) // count]
        for members, count in zip(kinds, num_series, strict=True)
        for index in range(count)
    ]


def _joined_name(members: list[str]) -> str:
    first, last = members[0], members[-1]
    if first == last:
        return first
    (begin, low, rest), (other_begin, high, _) = _around_number(first), _around_number(last)
    is_one_kind = low and high and begin == other_begin
    return f"{begin}{low}-{high}{rest}" if is_one_kind else f"{first}-{last}"


def _around_number(name: str) -> tuple[str, str, str]:
    """The name before, in and after the number that orders neighbours; a name without a number is all before."""
    found = _NUMBERED[0].fullmatch(name) or _NUMBERED[1].fullmatch(name)
    return (found[1], found[2], found[3]) if found else (name, "", "")
