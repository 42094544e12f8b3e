"""At home in training frameworks: one thin class each. Importing this package imports none of them.

    from wandb_gradwatch.integrations.lightning import GradWatchCallback
    from wandb_gradwatch.integrations.ignite import GradWatch
    from wandb_gradwatch.integrations.transformers import GradWatchCallback

Nothing is measured here: a framework gives the step, the run and the end, and takes the samples of the core.
"""
