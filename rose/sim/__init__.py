"""A discrete-event world that runs the same policies as the daemons."""
