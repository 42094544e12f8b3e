"""The causes: what each is called, what to do about it, which symptoms it explains, and the facts that refute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..snapshot import keys
from .evidence import Evidence


@dataclass(frozen=True)
class Cause:
    """One cause.

    Args:
        name: its identifier.
        text: what it is called, in a few words.
        advice: what to do, in a few words.
        remedy: what to do, in full.
        leads_to: kinds of symptoms that follow from it: found later in its incident, they are not told again.
        is_refuted: whether the facts at hand do not allow it.
        of_rank: what it is called if the only rank that it concerns is known, `{rank}`.
    """

    name: str
    text: str
    advice: str
    remedy: str
    leads_to: frozenset[str] = frozenset()
    is_refuted: Callable[[Evidence], bool] = lambda _: False
    of_rank: str = ""

    def text_of(self, rank: int | None) -> str:
        return self.of_rank.format(rank=rank) if self.of_rank and rank is not None else self.text


_BREAKS: Final = frozenset(
    {
        *("exploding_gradient", "gradient_spike", "nan_gradient", "inf_gradient", "nonfinite_loss", "loss_spike"),
        *("parameters_grow", "loss_scale_collapse", "vanishing_gradient", "dead_gradient", "no_gradient"),
        *("clipping_too_tight", "layer_jump", "loss_below_zero", "nothing_learned", "parameters_unchanged"),
        "parameters_shrink",
    }
)
_SILENCES: Final = frozenset(
    {"vanishing_gradient", "dead_gradient", "no_gradient", "nothing_learned", "parameters_unchanged", "initial_weights"}
)
_ALL: Final = _BREAKS | _SILENCES | {"large_inputs", "gradient_changed", "zero_inputs"}
_TRACE: Final = "watch(model, on_nonfinite='trace') names the operation"


def _no_large_update(e: Evidence) -> bool:
    return e.updates_are_small


_CAUSES: Final = (
    Cause(
        "learning_rate_too_high", "learning rate too high", "Divide it by 10, or warm up for longer",
        "divide the learning rate by 10 or lengthen its warm-up, and clip the gradients", _BREAKS, _no_large_update,
    ),
    Cause(
        "learning_rate_too_low", "learning rate far too low", "Raise it tenfold until the loss moves",
        "raise the learning rate tenfold until the loss moves; check whether its schedule is stepped per batch",
        _SILENCES, lambda e: e.moves_far,
    ),
    Cause(
        "learning_rate_zero", "learning rate of 0, or too small to matter", "Check the rate and its schedule",
        "check the learning rate of each group, its warm-up, and whether a schedule for epochs is stepped per batch",
        _SILENCES, lambda e: e.moves_far or e.f.rate != e.f.rate,
    ),
    Cause(
        "schedule", "the schedule goes below 0 instead of ending there", "End the schedule at 0",
        "end the schedule at 0, or give it as many steps as the training has", _ALL,
    ),
    Cause(
        "poor_initialisation", "poor initialisation", "Use kaiming_normal_ or xavier_uniform_",
        "initialise the weights with torch.nn.init.kaiming_normal_ or xavier_uniform_, with the gain of the activation",
        _ALL, lambda e: e.step > 60,
    ),
    Cause(
        "constant_initialisation", "all units of a layer begin equal", "Initialise the weights at random",
        "initialise the weights at random: equal units get equal updates and stay equal", _ALL,
    ),
    Cause(
        "depth", "a gain that builds up through depth", "Add residuals or normalisation",
        "add residual connections or normalisation, or lower the gain at initialisation", _ALL,
    ),
    Cause(
        "recurrence", "explosion through the recurrence", "Clip the gradients; shorten the sequence",
        "clip the gradients, shorten the sequence, begin the recurrence near the identity, or use an LSTM or GRU",
        _BREAKS, lambda e: not e.structure.is_recurrent_P.any(),
    ),
    Cause(
        "saturation", "saturated activations", "Use ReLU or GELU, or normalise what they get",
        "use ReLU or GELU, residual connections or normalisation; check the scale of what the activations get",
        _SILENCES,
    ),
    Cause(
        "dead_units", "dead units: an activation that never fires", "Lower the rate; use LeakyReLU or GELU",
        "lower the learning rate, check biases and masks, use LeakyReLU or GELU", _SILENCES,
    ),
    Cause(
        "bad_batch", "one bad batch", "Look at the batch of this step",
        "look at the batch of this step; clip the gradients (at a lower norm if you do), or skip such steps with "
        "guard='skip'", _BREAKS,
        lambda e: e.moves_far and not e.gradient_came_first,
    ),
    Cause(
        "data_changed", "the data has changed", "Look at what changed in the data at this step",
        "look at what changed in the data, the targets or the labels at this step; normalise them", _ALL,
    ),
    Cause(
        "data_scale", "inputs, targets or loss of a large scale", "Normalise them; take the mean in the loss",
        "normalise the inputs and the targets, take the mean in the loss", _ALL,
    ),
    Cause(
        "inputs_zero", "inputs that are all 0", "Check the data, its loading, masks and dropout on it",
        "check the data, its loading and its normalisation, masks and dropout on the inputs", _ALL,
        lambda e: e.f.fact("input_zero_ratio") < 1,
    ),
    Cause(
        "inputs_repeated", "the same batch again and again", "Check the data loader and its seed",
        "check the data loader, its sampler and the seeds of its workers", _ALL,
    ),
    Cause(
        "nonfinite_inputs", "NaN or Inf in the inputs", "Look at this batch and its loading",
        "look at the batch of this step and at how it is made; leave such batches out", _BREAKS,
        lambda e: e.inputs_are_good,
    ),
    Cause(
        "loss_reduction", "a loss that is divided too often", "Check the loss's reduction and scale",
        "check the loss's reduction, its weight and its scale", _SILENCES,
    ),
    Cause(
        "invalid_operation", "an operation without a finite derivative", "Add an epsilon to sqrt, log, divisions",
        f"add an epsilon inside sqrt, log and divisions; {_TRACE}", _BREAKS, lambda e: e.inputs_are_bad,
    ),
    Cause(
        "unseen", "something in steps that were not measured", "Look at their batches and their learning rate",
        "look at the batches and the learning rate of the steps before this one that were not measured; "
        "watch(model, sample_every=1) measures every step", _BREAKS,
    ),
    Cause(
        "loss_or_labels", "a loss that is not finite", "Look at the loss and the labels of this step",
        f"look at the loss, its inputs and the labels of this step (log 0, 0/0, exp); {_TRACE}", _BREAKS,
        lambda e: e.loss_is_good,
    ),
    Cause(
        "backward_scaled", "something in the backward multiplies the gradient", "Check hooks and own backwards",
        "check hooks on tensors and own backward code with torch.autograd.gradcheck", _ALL,
    ),
    Cause(
        "backward_zeroed", "something sets the gradient to 0", "Check hooks, detach() and masks there",
        "check hooks on tensors and parameters, detach() and masks of these layers", _ALL,
    ),
    Cause(
        "overflow", "an overflow beyond the type's range", "Use bfloat16 or float32 there; clip",
        "use bfloat16 or float32 for the operation that overflows, clip the gradients, lower the learning rate",
        _BREAKS, lambda e: e.inputs_are_bad,
    ),
    Cause(
        "underflow", "float16 underflow", "Use a GradScaler, or bfloat16",
        "use torch.amp.GradScaler, a larger loss scale, or bfloat16", _SILENCES,
    ),
    Cause(
        "loss_scale", "a loss scale that is too high", "Wait until it settles, or use bfloat16",
        "wait until the scale has settled; lower a fixed scale; otherwise use bfloat16", _BREAKS,
    ),
    Cause(
        "unscale_missing", "unscale_() is missing before clipping", "Call scaler.unscale_(optimizer) first",
        "call scaler.unscale_(optimizer) before clip_grad_norm_", _ALL,
    ),
    Cause(
        "clipping_too_tight", "clipping far too tight", "Raise max_norm to about the usual norm",
        "raise max_norm to about the usual norm", _ALL,
    ),
    Cause(
        "weight_decay", "too strong a weight decay or penalty", "Divide the weight decay by 10",
        "divide the weight decay by 10; if it is decoupled (AdamW), its product with the learning rate counts", _ALL,
    ),
    Cause(
        "small_batch_norm", "batch norm over too few or too equal inputs", "Use larger batches, or GroupNorm",
        "use larger batches, GroupNorm or LayerNorm; look at its eps", _ALL, lambda e: not e.structure.has_norm,
    ),
    Cause(
        "attention_logits", "attention logits that are too large", "Normalise queries and keys; check the mask",
        "normalise queries and keys, scale by 1/sqrt(d), check that no row of the mask is empty", _BREAKS,
        lambda e: not e.structure.is_attention_P.any(),
    ),
    Cause(
        "routing", "a router that sends everything to few experts", "Add a balancing loss or noise",
        "raise the weight of the load-balancing loss, or add noise to the router", _ALL,
    ),
    Cause(
        "optimizer_settings", "the optimizer's eps or state", "Check eps and the dtype of its state",
        "check the optimizer's eps and betas; keep its state in float32", _ALL,
    ),
    Cause(
        "not_in_optimizer", "no optimizer holds them", "Build the optimizer last, or add_param_group()",
        "build the optimizer after the model is complete, or call add_param_group(); freeze what is not to be trained",
        _ALL,
    ),
    Cause(
        "stale_optimizer", "the optimizer holds other tensors than the model", "Build it after the model is complete",
        "create the optimizer from the parameters of the model that is trained, after the model was rebuilt, copied or "
        "moved",
        _ALL,
    ),
    Cause(
        "gradients_zeroed", "gradients zeroed between backward() and step()", "Call zero_grad() after step()",
        "call zero_grad() after step(), or before backward(); to drop a gradient on purpose, leave out step() as well",
        _SILENCES,
    ),
    Cause(
        "zero_grad_missing", "zero_grad() is missing", "Call optimizer.zero_grad() once per update",
        "call optimizer.zero_grad() once per update, before backward() or after step()", _ALL,
    ),
    Cause(
        "unused_layers", "layers that the loss does not use", "Check detach(), and the use of the output",
        "check detach(), torch.no_grad(), requires_grad and the use of the output in the loss; pass exclude= for those "
        "that are frozen on purpose",
        _SILENCES,
    ),
    Cause(
        "frozen_layers", "frozen or detached layers", "Check requires_grad, detach() and no_grad()",
        "check requires_grad, detach() and torch.no_grad() in front of them; re-entrant checkpoints need an input that "
        "requires a gradient",
        _SILENCES,
    ),
    Cause(
        "no_step", "step() is never called", "Call optimizer.step() after backward()",
        "call optimizer.step() after backward()", _SILENCES,
    ),
    Cause(
        "updates_undone", "something undoes the updates", "Look for code that writes the parameters back",
        "look for code that overwrites the parameters after step(), as load_state_dict() or an average copied back",
        _ALL,
    ),
    Cause(
        "wrong_sign", "wrong sign of the loss", "Check the sign, and the optimizer's maximize=",
        "check the sign of the loss: what is maximised needs a minus; check maximize= of the optimizer", _BREAKS,
    ),
    Cause(
        "unbounded_loss", "a loss without a lower bound", "Bound the loss; check labels and its sign",
        "give the loss a lower bound, which a binary cross-entropy of labels outside 0 to 1 does not have", _BREAKS,
    ),
    Cause(
        "broken_weights", "weights that were loaded or changed by hand", "Look for code that writes parameters",
        "look for code that writes to the parameters at this step; go on from the last good checkpoint", _BREAKS,
    ),
    Cause(
        "no_signal", "labels or features carry no information", "Check labels, shuffling and frozen features",
        "check that labels belong to their inputs, that the loss gets logits, and that features are not random",
        _SILENCES, lambda e: e.moves_far,
    ),
    Cause(
        "code_after_backward", "code between backward() and step() changes the gradient", "Check that code",
        "check divisors, factors and reductions in the code between backward() and step()", _ALL,
    ),
    Cause(
        "not_averaged", "gradients are not averaged over ranks", "Call the wrapped model, not its inner one",
        "call the model that DistributedDataParallel returns, and wrap it after it was moved; without it all-reduce "
        "the gradients before step(); if ranks are meant to train models of their own, leave this kind out of rules=",
        frozenset(), lambda e: not e.f.fact("replicas_num_different") > 0 or e.f.fact("replicas_gradients_num") > 0,
    ),
    Cause(
        "replicas_began_apart", "replicas started differently", "Broadcast rank 0's parameters first",
        "seed all ranks alike or load the same checkpoint on all of them, or broadcast the parameters of rank 0 before "
        "the first step",
        frozenset(), lambda e: not e.f.fact("replicas_begun") > 0,
    ),
    Cause(
        "rank_gradient", "ranks apply different gradients", "Check what ranks do after the averaging",
        "look for code between the averaging and step() that does not do the same on every rank, such as clipping, "
        "or a condition on the rank; go on from a checkpoint of before this step",
        frozenset(), lambda e: not e.f.fact("replicas_num_different") > 0, "rank {rank} applies another gradient",
    ),
    Cause(
        "contribution_lost", "a rank's contribution to the average was lost", "Test the links between devices",
        "test the links between devices and hosts, and the communication hook if there is one; go on from a checkpoint "
        "of before this step",
        frozenset(), lambda e: not e.f.ranks(keys.LOST_RANK) >= 0, "the contribution of rank {rank} was lost",
    ),
    Cause(
        "replica_changed", "parameters that not all ranks have changed", "Go on from an earlier checkpoint",
        "look for code that changes parameters on some ranks only, such as a checkpoint that not all have loaded; go "
        "on from a checkpoint of before this step on all ranks; where it happens again on the same rank, have its "
        "device tested: its memory or arithmetic may fail",
        frozenset(), lambda e: e.f.fact("replicas_num_different") > 0 or e.f.fact("replicas_own_rates") > 0,
        "parameters that only rank {rank} has changed",
    ),
    Cause(
        "bad_rank", "one bad rank", "Look at that rank's data and device",
        "look at that rank's part of the data and at its device; run it on another", _ALL,
    ),
    Cause(
        "another_rank", "the batch or the loss of another rank", "See what the other ranks say of it",
        "see what the other ranks say of this step, and look at that rank's batch and loss; "
        "watch(model, metrics=[Ranks()]) names the rank",
        _BREAKS, lambda e: e.inputs_are_bad, "the batch or the loss of rank {rank}",
    ),
)  # fmt: skip
CAUSES: Final = {cause.name: cause for cause in _CAUSES}
