"""Layers x steps as a W&B custom chart, drawn from the flight recorder's table."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

logger = logging.getLogger("wandb_gradwatch")

# A preset cannot be changed by name: a new drawing needs a new name.
CHART_NAME: Final = "gradwatch-flow-1"
# What the drawing calls a field, and the flight recorder's column that fills it.
FLOW_FIELDS: Final[Mapping[str, str]] = MappingProxyType({"step": "step", "layer": "name", "norm": "grad_norm"})


def flow_spec() -> dict[str, Any]:
    """The chart in Vega-Lite; W&B fills in `${field:...}` and `${string:...}`."""
    norm = "datum['${field:norm}']"
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": "${string:title}",
        "data": {"name": "wandb"},
        # Zero has no logarithm and stays empty, as does what is missing.
        "transform": [
            {"filter": f"isValid({norm}) && {norm} > 0"},
            {"calculate": f"log({norm}) / LN10", "as": "log_norm"},
        ],
        "mark": "rect",
        "width": "container",
        "height": "container",
        "encoding": {
            "x": {"field": "${field:step}", "type": "ordinal", "axis": {"title": "step", "labelOverlap": True}},
            # In the order of the table, which is the model's.
            "y": {"field": "${field:layer}", "type": "nominal", "sort": None, "axis": {"title": None}},
            "color": {
                "field": "log_norm",
                "type": "quantitative",
                "aggregate": "max",
                "scale": {"scheme": "viridis"},
                "legend": {"title": "log10 norm"},
            },
            "tooltip": [
                {"field": "${field:layer}", "type": "nominal", "title": "layer"},
                {"field": "${field:step}", "type": "quantitative", "title": "step"},
                {"field": "${field:norm}", "type": "quantitative", "title": "norm", "aggregate": "max"},
            ],
        },
    }


def ensure_flow_chart(entity: str) -> str | None:
    """Save the chart as a private preset of the entity and return its id; None, said once, where W&B refuses.

    A preset that is there already is what we want: W&B's complaint about it is no failure.
    """
    import wandb

    api = wandb.Api()
    if not hasattr(api, "create_custom_chart"):
        logger.warning("the report has no layers x steps chart: that needs a newer wandb than %s", wandb.__version__)
        return None
    try:
        return str(
            api.create_custom_chart(
                entity=entity,
                name=CHART_NAME,
                display_name="Gradient flow (gradwatch)",
                spec_type="vega2",
                access="private",
                spec=json.dumps(flow_spec()),
            )
        )
    except Exception as error:  # of wandb's several kinds: the report is worth more than this panel
        if "exist" in str(error).lower() or "duplicate" in str(error).lower():
            return f"{entity}/{CHART_NAME}"
        logger.warning("the report has no layers x steps chart, because W&B refused to save it: %s", error)
        return None
