"""A saved W&B workspace view with the gradients' panels, for all runs of a project."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from .._page.page import WORDS
from ..snapshot import keys
from .template import SECTIONS, markdown_words, no_project, require_workspaces, speaking_to_wandb

VIEW_NAME: Final = "Gradients"
# The part of the view's address that its name determines, by which it is found again: W&B's ids are like this.
_VIEW_ID: Final = f"gw{hashlib.sha256(VIEW_NAME.encode()).hexdigest()[:9]}"


def save_workspace(entity: str, project: str) -> str:
    """Save the view, or bring the one of its name up to date, whoever saved it, and return its address.

    Raises:
        ImportError: wandb-workspaces is not installed.
        ValueError: there is no such project.
        RuntimeError: W&B refused; wandb.Error where it is the login.
    """
    _, workspaces = require_workspaces()
    workspace = build_workspace(entity, project)
    with speaking_to_wandb():
        workspace._internal_name = f"nw-{_VIEW_ID}-v"
        existing = _find_view(workspaces, entity, project)
        for identity in ("_internal_name", "_internal_id", "_internal_runset_id") if existing is not None else ():
            setattr(workspace, identity, getattr(existing, identity))
        return str(workspace.save().url)


def build_workspace(entity: str, project: str) -> Any:
    """The view as an object of wandb-workspaces, not saved. No network."""
    reports, workspaces = require_workspaces()
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=VIEW_NAME,
        sections=[_section(reports, workspaces, key, is_open=index < 3) for index, key in enumerate(SECTIONS)],
        settings=workspaces.WorkspaceSettings(
            x_axis=keys.STEP,
            # Else W&B makes one section for every layer.
            group_by_prefix="first",
            point_visualization_method="bucketing",
            max_runs=10,
        ),
        auto_generate_panels=False,
    )


def _section(reports: Any, workspaces: Any, key: str, *, is_open: bool) -> Any:
    panels = [panel.build(reports) for panel in SECTIONS[key]]
    panels.append(reports.MarkdownPanel(markdown=markdown_words(WORDS[key])))
    return workspaces.Section(
        name=WORDS[key].title,
        panels=panels,
        is_open=is_open,
        layout_settings=workspaces.SectionLayoutSettings(columns=min(len(panels), 4), rows=1),
        panel_settings=workspaces.SectionPanelSettings(x_axis=keys.STEP),
    )


def _find_view(workspaces: Any, entity: str, project: str) -> Any:
    """The saved view; None where there is none."""
    from wandb_workspaces.workspaces.internal import View

    try:
        return workspaces.Workspace._from_model(View.from_name(entity, project, f"nw-{_VIEW_ID}-v"))
    except ValueError as error:
        if "not found in project" in str(error):  # the project is there, the view is not
            return None
        raise no_project(entity, project) from error
