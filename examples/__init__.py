"""Programs beside the package that show its use; they are not installed."""
