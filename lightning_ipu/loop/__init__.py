"""Lightning's loop under this strategy: logs, counters, events, the position of a run, the launcher."""
