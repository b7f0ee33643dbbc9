"""Programs that show how to use the package; they are not installed with it."""
