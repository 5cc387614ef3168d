"""Protection against other users of this machine and against files of other people."""
