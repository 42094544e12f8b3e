"""The W&B report and workspace, and their previews."""
