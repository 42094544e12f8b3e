"""What a script in a process of its own inherits."""

from __future__ import annotations

import os


def inherited() -> dict[str, str]:
    """This process's environment, without the address of its wandb-core, which wandb.init() leaves in it.

    A script that found it would write its run there, and nothing would be left in its own folder.
    """
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
