"""Reports that read whole runs: which lines of a file are one run, its columns, and a note."""
