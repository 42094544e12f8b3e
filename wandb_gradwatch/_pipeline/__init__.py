"""The path of samples on the host: to snapshots, rules, the flight recorder and the sinks.

Each part of the state has one owner:

    pipeline.py       samples that have arrived, the samples of the open window
    rank_merge.py     windows in the merge over ranks
    alert_manager.py  the rules, and the episodes of each title
    recorder.py       the last samples, the user's notes, and the alerts that were sent
    dispatcher.py     the sinks, the user's callbacks, messages that are logged once, the news for the schedule

The capture and the sample buffer precede this package; the watcher owns all objects of this package.
"""
