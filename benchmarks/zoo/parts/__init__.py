"""What healthy trainings are made of: models by architecture, with their data, losses and recipes."""
