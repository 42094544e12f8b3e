"""From samples to incidents: facts, findings, causes, and the verdict. Pure: it needs neither torch nor a W&B run."""
