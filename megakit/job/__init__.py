"""From the command line to the exit status, without torch: options, plan, run, processes."""
