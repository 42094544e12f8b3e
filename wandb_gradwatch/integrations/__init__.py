"""One class for each training framework. Importing this package imports none of the frameworks.

    from wandb_gradwatch.integrations.lightning import GradWatchCallback
    from wandb_gradwatch.integrations.ignite import GradWatch
    from wandb_gradwatch.integrations.transformers import GradWatchCallback

The classes do not measure. They pass the framework's step, run and end of training to a watcher, and log its samples.
"""
