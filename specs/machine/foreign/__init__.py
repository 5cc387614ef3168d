"""What another user of this machine, or a file of somebody else's, may not do to us."""
