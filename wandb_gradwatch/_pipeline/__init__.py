"""From samples that have arrived on the host to snapshots, rules, the flight recorder and the sinks.

What is remembered here has one owner each:

    pipeline.py       what has arrived, the open window's samples, the windows that are being merged over ranks
    alert_manager.py  the rules, and which episodes of each title are open
    dispatcher.py     the sinks, the user's callbacks, the flight recorder, what was said once

The rest are functions: arrays in, arrays out. Below are the gradients (the sampler and the device's window own those),
above is the watcher, who owns all of it.
"""
