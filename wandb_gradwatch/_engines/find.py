"""Finds the engine that trains a model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .._runtime.wrappers import unwrapped
from . import deepspeed, megatron
from .shadow import Shadow


def shadow_for(model: nn.Module) -> Shadow | None:
    """Return what is watched in place of a model that an engine trains; None for any other model.

    Raises:
        ValueError: the engine keeps gradients where they cannot be measured. The message says what to do.
    """
    engines = deepspeed.engines_that_train(model)
    if engines:
        if (why := deepspeed.refusal(engines[-1])) is not None:
            raise ValueError(f"watch(): {why}")
        inner = unwrapped(model)
        return Shadow(deepspeed.DeepSpeed(engines[-1], inner), inner)
    if megatron.has_main_grad(model):
        optimizer = megatron.optimizer_of(model)
        if (why := megatron.refusal(model, optimizer)) is not None:
            raise ValueError(f"watch(): {why}")
        inner = unwrapped(model)
        return Shadow(megatron.MegatronCore(inner, optimizer), inner)
    return None


def with_shadows(models: Any) -> Any:
    """Return a module, or a sequence or mapping of modules, with shadows in place of the models of engines."""
    if isinstance(models, nn.Module):
        shadow = shadow_for(models)
        return models if shadow is None else shadow.module
    if isinstance(models, Mapping):
        return {key: with_shadows(one) if isinstance(one, nn.Module) else one for key, one in models.items()}
    if isinstance(models, Sequence) and not isinstance(models, str):
        return [with_shadows(one) if isinstance(one, nn.Module) else one for one in models]
    return models


def engine_since_watch(models: Iterable[nn.Module]) -> str | None:
    """Return why watched modules cannot be watched any longer: an engine trains one of them now. None: it does not."""
    for model in models:
        if (engine := engine_of(model)) is not None:
            return f"{engine} was set up after watch(): call watch() again, when the model and its optimizer are ready"
    return None


def engine_of(model: nn.Module) -> str | None:
    """Return the name of the engine that trains this model; None without one."""
    if deepspeed.engines_that_train(model):
        return "DeepSpeed"
    return "Megatron-core" if megatron.has_main_grad(model) else None
