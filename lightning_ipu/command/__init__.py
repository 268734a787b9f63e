"""What `python -m` needs: options, configurations, the output directory, the display, signals and scores."""
