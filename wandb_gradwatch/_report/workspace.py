"""A saved W&B workspace view with the gradients' panels, for all runs of a project."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from ..snapshot import keys
from .template import SECTIONS, TemplateSection, markdown_words, require_workspaces, speaking_to_wandb

VIEW_NAME: Final = "Gradients"


def save_workspace(entity: str, project: str, *, name: str = VIEW_NAME, url: str | None = None) -> str:
    """Save the view, or bring it up to date if it is there, and return its address.

    Args:
        entity: the user or team that owns the project.
        project: an existing project.
        name: the view's name. Saving again under the same name updates the same view, whoever saved it.
        url: replace this view instead; it keeps its address.

    Raises:
        ImportError: wandb-workspaces is not installed.
        ValueError: there is no such project, or no such view at `url`.
        RuntimeError: W&B refused; wandb.Error where it is the login.
    """
    _, workspaces = require_workspaces()
    workspace = build_workspace(entity, project, name=name)
    with speaking_to_wandb():
        if url is not None:
            _take_place_of(workspace, workspaces.Workspace.from_url(url))
        else:
            existing = _find_view(workspaces, entity, project, view_id(name))
            if existing is not None:
                _take_place_of(workspace, existing)
            else:
                workspace._internal_name = f"nw-{view_id(name)}-v"
        return str(workspace.save().url)


def build_workspace(entity: str, project: str, *, name: str = VIEW_NAME) -> Any:
    """The view as an object of wandb-workspaces, not saved. No network."""
    reports, workspaces = require_workspaces()
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[_section(reports, workspaces, section, index) for index, section in enumerate(SECTIONS)],
        settings=workspaces.WorkspaceSettings(
            x_axis=keys.STEP,
            # Else W&B makes one section for every layer.
            group_by_prefix="first",
            point_visualization_method="bucketing",
            max_runs=10,
        ),
        auto_generate_panels=False,
    )


def view_id(name: str) -> str:
    """The part of the view's address that its name determines: that is how it is found again."""
    # W&B's own ids are 11 characters of this kind.
    return f"gw{hashlib.sha256(name.encode()).hexdigest()[:9]}"


def _section(reports: Any, workspaces: Any, section: TemplateSection, index: int) -> Any:
    panels = [panel.build(reports) for panel in section.panels]
    panels.append(reports.MarkdownPanel(markdown=markdown_words(section.words)))
    return workspaces.Section(
        name=section.words.title,
        panels=panels,
        is_open=index < 3,
        layout_settings=workspaces.SectionLayoutSettings(columns=min(len(panels), 4), rows=1),
        panel_settings=workspaces.SectionPanelSettings(x_axis=keys.STEP),
    )


def _find_view(workspaces: Any, entity: str, project: str, view: str) -> Any:
    """The saved view of this id; None where there is none."""
    from wandb_workspaces.workspaces.internal import View

    try:
        return workspaces.Workspace._from_model(View.from_name(entity, project, f"nw-{view}-v"))
    except ValueError as error:
        if "not found in project" in str(error):  # the project is there, the view is not
            return None
        raise ValueError(
            f"there is no project {entity}/{project}, or you have no access to it; a run that logs to it creates it"
        ) from error


def _take_place_of(workspace: Any, existing: Any) -> None:
    for identity in ("_internal_name", "_internal_id", "_internal_runset_id"):
        setattr(workspace, identity, getattr(existing, identity))
