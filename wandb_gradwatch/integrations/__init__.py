"""One thin class for each training framework. Importing this package imports none of the frameworks.

    from wandb_gradwatch.integrations.lightning import GradWatchCallback
    from wandb_gradwatch.integrations.ignite import GradWatch
    from wandb_gradwatch.integrations.transformers import GradWatchCallback

Nothing is measured here: a framework says what the step and the run are and when training ends, and takes samples.
"""
