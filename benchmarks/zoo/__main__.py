"""Score alerts on trainings with known answers, beside other detectors.

python -m benchmarks.zoo --row NAME                 # the scoring half, into benchmarks/results/zoo.json and docs/zoo.md
python -m benchmarks.zoo --half all --row NAME      # the same with the sealed trainings, which run once, at the end
python -m benchmarks.zoo --every 20 --row NAME      # the same at the cadence that the default has with small models
python -m benchmarks.zoo --half tune --failures     # what goes wrong on the half that thresholds may be chosen on
python -m benchmarks.zoo --half tune --replay       # the same by the rules of now on samples that were kept: seconds
python -m benchmarks.zoo --only "zero_grad" --texts # the trainings whose name matches, with what was told
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time

from .cases import CASES, LOCKED, chosen
from .record import Recording, recordings
from .score import add_up, failures, score, seen_by_others
from .table import keep, result_of, write_pages


def _texts(recording: Recording) -> str:
    told = [f"  told at {one.at}, {one.alert.level} {one.alert.title}: {one.alert.text}" for one in recording.told]
    ends = [f"  ended by {recording.error}"] if recording.error else []
    where = (
        [] if recording.anomaly is None else [f"  detect_anomaly: step {recording.anomaly[0]}, {recording.anomaly[1]}"]
    )
    return "\n".join([f"{recording.case}, seed {recording.seed}, bad from {recording.first_bad}", *told, *ends, *where])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--half", choices=("tune", "score", "all"), default="score", help="all: the sealed ones as well"
    )
    parser.add_argument("--failures", action="store_true", help="print what went wrong")
    parser.add_argument("--replay", action="store_true", help="the rules of now on samples that were kept")
    parser.add_argument("--only", default="", help="those whose name or family matches this regular expression")
    parser.add_argument("--texts", action="store_true", help="print what was told")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="n > 1: the default cadence, on a clock on which it measures about every n-th step",
    )
    parser.add_argument("--row", help="the name under which the page shows the result")
    parser.add_argument("--resume", default="", metavar="NAME", help="keep what ran under a name, and go on from there")
    parser.add_argument(
        "--pages", action="store_true", help="only write the pages anew, from the results that are kept"
    )
    arguments = parser.parse_args()
    if arguments.pages:
        write_pages()
        return

    which = [
        (case, seed)
        for case, seed in chosen(arguments.half)
        if re.search(arguments.only, case.name) or re.search(arguments.only, case.family)
    ]
    began, scores, others = time.perf_counter(), [], []
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        run = lambda function, items: pool.imap(function, items, chunksize=1)  # noqa: E731
        found = recordings(which, map_=run, replayed=arguments.replay, resumed=arguments.resume, every=arguments.every)
        for number, recording in enumerate(found, 1):
            scores.append(score(CASES[recording.case], recording))
            others.append((scores[-1], seen_by_others(CASES[recording.case], recording)))
            if arguments.texts and scores[-1].family not in LOCKED:
                print(_texts(recording))
            if number % 20 == 0:
                print(
                    f"{number} of {len(which)} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True
                )
    figures = add_up(scores)
    for name, value in figures.items():
        print(f"{name:50s} {value:8.3f}")
    if arguments.failures:
        print("\n".join(failures(scores)))
    if arguments.row:
        keep(result_of(scores, others, arguments.row, arguments.every))


if __name__ == "__main__":
    main()
