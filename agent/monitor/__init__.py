"""What an observer sees of this host: its ranks, its GPUs and the processes on them. Reads only, never loads."""
