"""Which parameters are whole on this rank: a function of a piece is not the function of the whole."""

from __future__ import annotations

from .base import logger
from .naming import Models


class Whole:
    """Tells whole parameters from sharded ones, and says once what is left out."""

    def __init__(self) -> None:
        self._models = Models([])
        self._pieces: frozenset[str] = frozenset()
        self._said = False

    def bind(self, models: Models) -> None:
        """These are the models."""
        self._models = models

    def look(self) -> None:
        """Look again: models are sharded after watch() too."""
        all_flat = any(type(module).__name__ == "FullyShardedDataParallel" for _, module in self._models.modules())
        self._pieces = frozenset(
            name for name, parameter in self._models.parameters() if all_flat or type(parameter).__name__ == "DTensor"
        )
        if self._pieces and not self._said:
            self._said = True
            logger.warning(
                "wandb_gradwatch: %d parameters are sharded, %r among them: this rank holds a piece of each, so "
                "metrics, updates and differences of them are left out. Gradient norms are not concerned.",
                len(self._pieces),
                min(self._pieces),
            )

    def is_whole(self, name: str) -> bool:
        """Whether a function of this parameter, as it is here, is one of the whole."""
        return name not in self._pieces
